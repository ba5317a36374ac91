"""Words for ranks and numbers of things, as messages and reports use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

READ = 8
"""Maximum number of parts of a list in a message."""


def rank_list(ranks: Iterable[int]) -> str:
    """Return text such as ``rank 3`` or ``ranks 0, 2-5 and 7``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(one) for one in run])]
    if not parts:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {parts[0]}"
    if len(parts) > 2 * READ:
        return f"{len(ordered)} ranks ({', '.join(parts[:READ])}, …)"
    text = ", ".join(parts[:-1])
    return f"ranks {text}{text and ' and '}{parts[-1]}"


def shorten(words: Sequence[str], what: str = "") -> list[str]:
    """Return the first ``READ`` of `words` and the number of the others, or all if at most one more.

    The details of each rank in a report contain all of them.
    """
    more = len(words) - READ
    return list(words) if more < 2 else [*words[:READ], f"and {more} more{what and f' {what}'}"]


def inflect(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def inflect_phrase(what: str, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return what
    for one, many in (
        ("is ", "are "),
        ("has ", "have "),
        ("runs its ", "run their "),
        ("waits ", "wait "),
    ):
        if what.startswith(one):
            return many + what[len(one) :]
    return what
