"""The states of ranks that have ended or can't be queried, as data for the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpicoll.engine.diagnostics import flight_recorder
from mpicoll.engine.diagnostics.call_facts import State, to_json
from mpicoll.engine.diagnostics.flight_recorder import Group
from mpicoll.transport.base import Tally

_LAST_CALLS = 8


def list_counts(group: Group, messages: Tally) -> list[list[int | None]]:
    """Return numbers of messages for JSON, as lists of rank of the job, tag and number.

    The ranks in `messages` are those of `group`.
    """
    members = group.members
    return [[members[peer], tag, number] for (peer, tag), number in messages.items() if 0 <= peer < len(members)]


def make_departed_state(
    rank: int,
    how: str,
    words: str = "",
    numbers: Mapping[str, int] | None = None,
    sent: Mapping[str, Sequence[Sequence[int | None]]] | None = None,
    calls: Sequence[Sequence[Any]] = (),
) -> State:
    """Return the state of a rank that has ended.

    Args:
        rank: The rank in the job.
        how: "left" (it has announced that it makes no more calls) or "died".
        words: Details.
        numbers: The collectives that it had begun on each communicator, by key. Without them no wait for this rank can
            be proved to be endless.
        sent: The messages that it had sent, by key, as :func:`list_counts` returns them.
        calls: Its :func:`list_last_calls`.
    """
    assert how in ("left", "died")
    called = [
        {"key": key, "number": number, "call": {"name": name, "text": name} | ({} if root is None else {"root": root})}
        for key, number, name, root in calls
    ]
    return {"rank": rank, how: words, "numbers": dict(numbers or {}), "sent": dict(sent or {}), "called": called}


def list_last_calls(rank: int) -> list[list[Any]]:
    """Return the last collectives of `rank`, a rank of this process: key of the communicator, number, name and root.

    There are at most ``_LAST_CALLS``, since each rank that leaves sends them to all others.
    """
    found = []
    for (group, number, call, _, _), _, _ in reversed(flight_recorder.list_history()):
        if number and group.members[group.rank] == rank:
            found.append([group.key, number, call.name, to_json(call.root)])
            if len(found) == _LAST_CALLS:
                break
    return found


def make_unreached_state(rank: int, relay: int) -> State:
    """Return the state of a rank that was not queried, since `relay`, which forwards messages, does not respond."""
    return {"rank": rank, "unreached": relay}
