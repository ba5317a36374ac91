"""Words for ranks and numbers of things, as messages and reports use them."""

from __future__ import annotations

from collections.abc import Iterable

READ = 8
"""How many parts of a list people read."""


def rank_list(ranks: Iterable[int]) -> str:
    """Return such as ``rank 3`` or ``ranks 0, 2-5 and 7``."""
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
