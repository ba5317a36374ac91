"""Lists of ranks and of words, and numbers of things, for messages and reports.

Only the standard library is imported, so that every layer can use it, schedules included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized

READ = 8
"""Maximum number of parts of a list in a message."""


def rank_list(ranks: Iterable[int]) -> str:
    """Return text such as ``rank 3`` or ``ranks 0, 2-5 and 7``."""
    return number_list("rank", ranks)


def ranks_and_verb(ranks: Collection[int], one: str, many: str) -> str:
    """Return text such as ``rank 3 waits`` or ``ranks 0 and 1 wait``, for the verb ``("waits", "wait")``."""
    return f"{rank_list(ranks)} {inflect(ranks, one, many)}"


def number_list(noun: str, numbers: Iterable[int]) -> str:
    """Return `noun` and the sorted numbers, runs of more than two as ranges: ``chunk 3`` or ``chunks 0, 2-5 and 7``.

    A list of more than ``2 * READ`` parts is shortened to the first ``READ``.
    """
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(one) for one in run])]
    if not parts:
        return f"no {noun}"
    if len(parts) > 2 * READ:
        return f"{len(ordered)} {noun}s ({', '.join(parts[:READ])}, …)"
    return f"{noun}{'s' * (len(ordered) > 1)} {join_and(parts)}"


def join_and(words: Sequence[str]) -> str:
    """Return text such as ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def shorten(words: Sequence[str], what: str = "", most: int = READ) -> list[str]:
    """Return the first `most` of `words` and the number of the others, or all if at most one more.

    The details of each rank in a report contain all of them.
    """
    more = len(words) - most
    return list(words) if more < 2 else [*words[:most], f"and {more} more{what and f' {what}'}"]


def count(number: int, noun: str, plural: str = "") -> str:
    """Return text such as ``1 rank`` or ``3 ranks``; `plural` is the noun's plural if it doesn't only add an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def inflect(things: Sized, one: str, many: str) -> str:
    """Return `one`, the singular, for one thing, otherwise `many`."""
    return one if len(things) == 1 else many


def inflect_phrase(what: str, ranks: Sized) -> str:
    """Return a phrase that begins with a verb in the singular in the number that `ranks` require."""
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
