"""Facts about calls, as ranks exchange them: which arguments must agree, and whose data a call needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mpicoll.engine.diagnostics.flight_recorder import Call, Group

State: TypeAlias = dict[str, Any]
"""The state of a rank, for JSON: a :func:`~mpicoll.engine.diagnostics.rank_state.snapshot`, or that of a rank that has
ended or was not queried."""


def is_meeting(key: str) -> bool:
    """Return True if `key` is that of a sequence of meetings, and not that of a communicator."""
    return " " in key


def comm_key(key: str) -> str:
    """Return the key of the communicator, where `key` may be that of meetings of some of its ranks."""
    return key.partition(" ")[0]


def describe_call(call: Call, group: Group) -> State:
    """Return `call` for JSON, with the peers of messages as ranks of the job too."""
    found = {name: to_json(getattr(call, name)) for name in Call.__slots__ if name != "parts"}
    # An empty shape and an empty `takes` carry information; empty counts do not.
    kept = ("shape", "takes")
    found = {
        name: value for name, value in found.items() if value is not None and (value not in ("", []) or name in kept)
    }
    found["text"] = str(call)
    if not call.collective and call.peer is not None and 0 <= call.peer < len(group.members):
        found["world"] = group.members[call.peer]
    if call.parts:
        found["parts"] = [describe_call(part, group) for part in call.parts]
    return found


def to_json(value: Any) -> Any:
    """Return `value` for JSON: callers pass numbers of NumPy, too."""
    if isinstance(value, (tuple, list)):
        return [to_json(one) for one in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return int(value) if hasattr(value, "__index__") else str(value)


def messages_of(call: State, key: str) -> list[State]:
    """Return the messages that a call sends or receives, with peer (None: any rank) and tag (None: any).

    The list is empty if some of the messages are not known.
    """
    if call.get("collective"):
        return []
    parts = call.get("parts", [call])
    found = []
    for part in parts:
        name = part["name"]
        way = "send" if name in _SENDS else "recv" if name in _RECEIVES else None
        if way is None:
            return []
        found.append({"way": way, "key": key, "peer": part.get("world"), "tag": part.get("tag")})
    return found


_SENDS = ("send", "isend", "ssend", "issend")


_RECEIVES = ("recv", "irecv", "probe")


def call_text(call: State) -> str:
    """Return the call without its algorithm."""
    text: str = call["text"]
    return text.removesuffix(f" by {call.get('algorithm')}")


def call_with_number(one: State) -> str:
    """Return a call with its number and its communicator."""
    number = f" number {one['number']}" if one["number"] else ""
    return f"{call_text(one['call'])}{number} on {one['group']}"


def call_with_site(one: State) -> str:
    """Return a call with its communicator, unless that is the world, and its call site."""
    on = "" if one["group"] == "world" else f" on {one['group']}"
    return f"{call_text(one['call'])}{on}{at_site(one.get('site'))}"


def at_site(site: State | None) -> str:
    return "" if site is None else f" at {site['file'].rpartition('/')[2]}:{site['line']} in {site['function']}"


def group_matching(calls: Mapping[int, State]) -> list[list[int]]:
    """Return the ranks in groups whose calls may be the same collective."""
    kinds: list[list[int]] = []
    for rank, call in calls.items():
        for alike in kinds:
            if not _conflict(calls[alike[0]], call):
                alike.append(rank)
                break
        else:
            kinds.append([rank])
    return kinds


def _conflict(one: State, other: State) -> bool:
    """Return True if two calls can't be the same collective.

    Only fields that both calls have are compared: some calls have no dtype.
    """
    if kind_of(one["name"]) != kind_of(other["name"]):
        return True
    fields = [(call.get("dtype"), call.get("op"), call.get("root"), call.get("algorithm")) for call in (one, other)]
    if any(a is not None and b is not None and a != b for a, b in zip(*fields, strict=True)):
        return True
    if "arrivals" not in one and "arrivals" not in other and kind_of(one["name"]) != "alltoall":
        if "counts" in one and "counts" in other:
            return list(one["counts"]) != list(other["counts"])
        shapes = [call["shape"] for call in (one, other) if "shape" in call and "counts" not in call]
        if len(shapes) == 2 and math.prod(shapes[0]) != math.prod(shapes[1]):
            return True
    parts = [call.get("parts", []) for call in (one, other)]
    return len(parts[0]) != len(parts[1]) or any(map(_conflict, *parts))


_KINDS = (
    ("allreduce", "allreduce"),
    ("allgather", "allgather"),
    ("alltoall", "alltoall"),
    ("barrier", "barrier"),
    ("bcast", "bcast"),
    ("broadcast", "bcast"),
    ("exscan", "exscan"),
    ("gather", "gather"),
    ("reducescatter", "reduce_scatter"),
    ("reduce", "reduce"),
    ("scan", "scan"),
    ("scatter", "scatter"),
    ("split", "split"),
)


def kind_of(name: str) -> str:
    """Return the collective that is called `name` in this package or in torch."""
    short = name.replace("_", "")
    return next((kind for begin, kind in _KINDS if short.startswith(begin)), name)


FROM_ROOT, TO_ROOT = ("bcast", "scatter"), ("reduce", "gather")


_ALL_NEED_ALL = ("allreduce", "allgather", "alltoall", "reduce_scatter", "barrier", "split")


def ranks_needed(call: State, members: Sequence[int], me: int) -> set[int]:
    """Return the ranks of the job without which a collective can't complete on the `me`-th of `members`.

    These are the ranks whose data it needs, whatever its algorithm.
    """
    if call.get("parts"):
        return {rank for part in call["parts"] for rank in ranks_needed(part, members, me)}
    name, counts, root = kind_of(call["name"]), call.get("counts", []), call.get("root")
    if is_empty(call):
        return set()
    if name in ("scan", "exscan"):
        return set(members[:me])
    if name in FROM_ROOT:
        empty = name == "scatter" and counts and not counts[me]
        return set() if empty or root is None else {members[root]}
    if name in TO_ROOT and root != me:
        return set()
    if name not in (*_ALL_NEED_ALL, *TO_ROOT):
        return set()
    if name in ("allgather", "gather", "alltoall"):
        blocks = call.get("arrivals", []) if name == "alltoall" else counts
        return {rank for rank, count in zip(members, blocks, strict=True) if count} if blocks else set(members)
    if name == "reduce_scatter" and counts and not counts[me]:
        return set()
    return set(members)


def is_empty(call: State) -> bool:
    """Return True if no data is moved, so that no rank need wait."""
    if kind_of(call["name"]) in ("barrier", "split"):
        return False
    shape = call.get("shape")
    uneven = "counts" in call or "arrivals" in call
    return bool(shape is not None and 0 in (shape[1:] if uneven else shape))
