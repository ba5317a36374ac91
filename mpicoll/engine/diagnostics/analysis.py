"""Analysis of the states of all ranks: waits, missing calls and deadlocks, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpicoll.engine.diagnostics.call_facts import State, at_site, call_text, call_with_site, comm_key
from mpicoll.engine.diagnostics.deadlock import MIN_WAIT, Deadlock, DeadlockSearch
from mpicoll.engine.diagnostics.pending import describe_mismatches, pending_operations
from mpicoll.wording import inflect, inflect_phrase, rank_list, ranks_and_verb, shorten


@dataclass(slots=True)
class Analysis:
    """The result of an analysis.

    `words` are sentences, the first of which is the most important. `waiting` are the operations in which ranks
    wait, each with the ranks that have begun it and those that have not. `missing` are all ranks for which others
    wait, `silent` those that have not responded, `unreached` those that could not be queried.
    """

    words: list[str] = field(default_factory=list)
    waiting: list[State] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    deadlock: Deadlock | None = None


def analyse(states: Mapping[int, State | None], size: int) -> Analysis:
    """Return the analysis of the states of the ranks of a job of `size`.

    The state of a rank that has not responded is None.
    """
    known = {rank: state for rank, state in states.items() if state is not None}
    found = Analysis(
        silent=[rank for rank in range(size) if rank not in known],
        unreached=[rank for rank, state in sorted(known.items()) if "unreached" in state],
    )
    collectives, messages = pending_operations(known)
    for wait in collectives:
        found.mismatches += describe_mismatches(wait, known)
    found.deadlock = DeadlockSearch(known, MIN_WAIT).find()
    roots: list[str] = []
    others: list[str] = []
    for wait in [*collectives, *messages]:
        (roots if _is_root(wait, known) else others).append(_sentence(wait, known))
        found.waiting.append({name: wait[name] for name in ("key", "group", "number", "call", "begun", "missing")})
        found.missing = sorted({*found.missing, *wait["missing"]} - {*found.unreached})
    others += [_describe_positions(wait) for wait in collectives if wait["missing"] and any(_positions(wait))]
    found.words = [*found.mismatches]
    if found.deadlock is not None:
        found.words = [one for one in found.words if one not in found.deadlock.mismatches]
        found.words.insert(0, str(found.deadlock))
    found.words += shorten(roots + others, "sentences")
    found.words += [
        f"rank {rank} {describe_rank(state, '')}" for rank, state in sorted(known.items()) if "died" in state
    ]
    if found.unreached:
        relay = known[found.unreached[0]]["unreached"]
        found.words.insert(
            0,
            f"rank {relay} does not respond (stopped, frozen or without a core?); it relays the messages of the"
            f" watchdogs, so nothing is known about {rank_list(found.unreached)}",
        )
    elif found.silent and any("died" in state for state in known.values()):  # there was little time to answer
        found.words.append(f"{ranks_and_verb(found.silent, 'has', 'have')} not responded")
    elif found.silent:
        verb = inflect(found.silent, "does", "do")
        found.words.append(f"{rank_list(found.silent)} {verb} not respond (stopped, frozen or without a core?)")
    found.words += _describe_run_delays(known)
    if not found.words:
        found.words.append("no rank waits in an operation")
    return found


def _describe_run_delays(known: Mapping[int, State]) -> list[str]:
    """Return a sentence about the ranks that had no core for much of the longest wait. Operations that were late for
    this reason go on when it ends, so the last time without a core counts too if it has just ended."""
    states = known.values()
    waits = [one["seconds"] for state in states for one in state.get("pending", [])]
    delayed = [ago + seconds for state in states for ago, seconds in state.get("run_delay", []) if ago < _RECENT]
    window = max([*waits, *delayed], default=0.0)
    delays: dict[int, float] = {}
    for rank, state in sorted(known.items()):
        delay = min(window, sum(seconds for ago, seconds in state.get("run_delay", []) if ago < window))
        if delay >= max(_LEAST_RUN_DELAY, _RUN_DELAY_SHARE * window):
            delays[rank] = delay
    if not delays:
        return []
    seconds = f"{inflect(delays, '', 'up to ')}{max(delays.values()):.3g} of the last {window:.3g} s"
    why = f"other processes use the cores, or a cgroup limits {inflect(delays, 'its', 'their')} time"
    return [f"{ranks_and_verb(delays, 'was', 'were')} ready to run, but had no core, for {seconds}: {why}"]


_LEAST_RUN_DELAY = 1.0
"""Seconds without a core from which on a report names a rank."""

_RUN_DELAY_SHARE = 0.25
"""Share of the time from which on it does."""

_RECENT = 5.0
"""Seconds since the end of a time without a core that has just ended."""


def _sentence(wait: State, known: Mapping[int, State]) -> str:
    """Return a sentence about the waiting and the missing ranks of an operation."""
    missing, number = wait["missing"], wait["number"]
    if number:
        what = f"{wait['call']} number {number} on {wait['group']}"
        if not missing:
            late = max(one["seconds"] for one in wait["by"].values())
            return f"{what} was begun by all its ranks, and has not ended after {late:.3g} s{_positions_text(wait)}"
        what += f" waits for {rank_list(missing)}"
    else:
        (rank, one), *_ = wait["by"].items()
        what = f"rank {rank} has been waiting for {one['seconds']:.3g} s in {call_with_site(one)}"
        if not missing:
            return what
    doing: dict[str, list[int]] = {}
    for rank in missing:
        doing.setdefault(describe_rank(known.get(rank), wait["key"] if number else ""), []).append(rank)
    if len(doing) > 1 or not number:
        each = [f"{rank_list(ranks)} {inflect_phrase(text, ranks)}" for text, ranks in doing.items()]
        return f"{what}: {', '.join(shorten(each))}"
    (text,) = doing
    state = known.get(missing[0])
    if state is None or state.keys() & {"left", "died", "unreached"}:
        return f"{what}, which {inflect_phrase(text, missing)}"
    called = f"which {inflect(missing, 'has', 'have')} not called it: {inflect(missing, 'it', 'they')}"
    return f"{what}, {called} {inflect_phrase(text, missing)}"


def _is_root(wait: State, known: Mapping[int, State]) -> bool:
    """Return True if this wait may be the cause of others: a missing rank does not wait itself, or none is missing."""
    if not wait["missing"]:
        return bool(wait["number"])
    return any(not known.get(rank, {}).get("pending") for rank in wait["missing"])


def _positions(wait: State) -> dict[str, list[int]]:
    """Return the waiting ranks by their position within the operation."""
    found: dict[str, list[int]] = {}
    for rank, one in wait["by"].items():
        if one.get("where"):
            found.setdefault(one["where"], []).append(rank)
    return found


def _positions_text(wait: State) -> str:
    stand = [f"{ranks_and_verb(ranks, 'is', 'are')} in {where}" for where, ranks in _positions(wait).items()]
    return f": {'; '.join(shorten(stand))}" if stand else ""


def _describe_positions(wait: State) -> str:
    return f"{wait['call']} number {wait['number']} on {wait['group']}{_positions_text(wait)}"


def describe_rank(state: State | None, key: str) -> str:
    """Return a description of a missing rank: a verb and its complement."""
    if state is None:
        return "has not responded"
    if "left" in state:
        return "has exited without calling it" if comm_key(key) in state["numbers"] else "has exited"
    if "died" in state:
        return f"has died{f' ({words})' if (words := state['died']) else ''}"
    if "unreached" in state:
        return f"could not be queried, because rank {state['unreached']} does not respond"
    pending = state.get("pending", [])
    own = next((one for one in pending if one["key"] == key and one["number"]), None)
    if own is not None:
        return f"is still in number {own['number']}, {call_with_site(own)}"
    program = state.get("program", {})
    now = next((one for one in pending if one["program"]), None)
    if now is not None:
        return f"is in {call_with_site(now)}"
    if program.get("waits") == "queue":
        behind = next((one for one in pending if one["key"] == program["key"] and one["number"]), None)
        after = f", behind {call_text(behind['call'])}" if behind is not None else ""
        return f"waits for an operation that it has started{after}{at_site(program.get('site'))}"
    return f"runs its own program{at_site(program.get('site'))}"
