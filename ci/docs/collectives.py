#!/usr/bin/env python3
"""Draw what each rank has before and after each collective, by calling it on four ranks.

    python ci/docs/collectives.py docs/images

writes collective-NAME.svg for each. The pages of docs/ show these files, and tests/ci/test_pictures.py compares them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mpicoll

RANKS = 4

MOVES: dict[str, Callable[[Any, bool], tuple[Any, Any]]] = {
    "bcast": lambda x, is_root: (x if is_root else None, mpicoll.bcast(x)),
    "scatter": lambda x, is_root: (x if is_root else None, mpicoll.scatter(x if is_root else x[:1])),
    "gather": lambda x, is_root: (x[:1], mpicoll.gather(x[:1])),
    "allgather": lambda x, is_root: (x[:1], mpicoll.allgather(x[:1])),
    "alltoall": lambda x, is_root: (x, mpicoll.alltoall(x)),
    "reduce": lambda x, is_root: (x, mpicoll.reduce(x)),
    "allreduce": lambda x, is_root: (x, mpicoll.allreduce(x)),
    "reduce_scatter": lambda x, is_root: (x, mpicoll.reduce_scatter(x)),
}
"""For an array, and whether this rank is the root: the part of it that matters, and the result."""

# Okabe and Ito's colours, which people with any kind of colour vision can distinguish.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7")

STYLE = """
:root { --paper: #ffffff; --ink: #1f2a33; --grey: #5b6770; --cell: #f4f6f8; --line: #aeb8c1; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #e6eaee; --grey: #a3adb6; --cell: #2b3138; --line: #56616b; }
}
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 13px; fill: var(--ink); text-anchor: middle; }
.name { font-size: 16px; font-weight: 600; text-anchor: start; }
.grey { fill: var(--grey); }
.paper { fill: var(--paper); }
.cell { fill: var(--cell); stroke: var(--line); }
.none { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
.arrow { stroke: var(--grey); stroke-width: 2; fill: none; }
"""

LEFT, TOP, CELL, ROW, GAP = 62, 62, 34, 34, 58
"""Place of the first cell, the width of a cell, the height of a row, and the gap between before and after."""


class Content(NamedTuple):
    """An array as it is drawn: its numbers, and for each the ranks that have contributed to it, as a mask."""

    numbers: list[int]
    masks: list[int]


def call(name: str) -> list[tuple[Content | None, Content | None]]:
    """Return what each rank has before and after a collective. Tens are the rank, ones the position, as in the
    tutorial; the masks are those of a call with a bit for each rank."""

    def run() -> tuple[Content | None, Content | None]:
        rank = mpicoll.world().rank
        numbers = MOVES[name](10 * rank + np.arange(RANKS), rank == 0)
        masks = MOVES[name](np.full(RANKS, 1 << rank), rank == 0)
        before, after = (
            None if one is None else Content(np.ravel(one).tolist(), np.ravel(mask).tolist())
            for one, mask in zip(numbers, masks, strict=True)
        )
        return before, after

    return mpicoll.run_local(run, RANKS)


def draw(name: str) -> str:
    """Return the picture of a collective, as the text of an SVG file."""
    arrays = call(name)
    side = RANKS * CELL
    width, height = LEFT + 2 * side + GAP + 14, TOP + RANKS * ROW + 8
    # Narrow enough for two of them beside each other on a page of the site.
    shown = f'width="340" height="{round(340 * height / width)}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {shown} role="img" aria-labelledby="title">',
        f'<title id="title">{name}: what each of {RANKS} ranks has before and after it</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
        f'<text class="name" x="14" y="24">{name}</text>',
        f'<text class="grey" x="{LEFT + side / 2:g}" y="{TOP - 10}">before</text>',
        f'<text class="grey" x="{LEFT + side + GAP + side / 2:g}" y="{TOP - 10}">after</text>',
    ]
    for rank, (before, after) in enumerate(arrays):
        y = TOP + rank * ROW
        lines.append(f'<text class="grey" x="{LEFT / 2 - 2:g}" y="{y + 18}">rank {rank}</text>')
        lines += draw_array(LEFT, y, before)
        lines += draw_array(LEFT + side + GAP, y, after)
    middle, x = TOP + RANKS * ROW / 2 - 3, LEFT + side + 14
    lines.append(f'<path class="arrow" d="M{x} {middle:g}h{GAP - 30}m-8 -6l8 6l-8 6"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw_array(x: int, y: int, content: Content | None) -> Iterator[str]:
    """Yield the cells of an array; a dashed line around nothing if there is none, or if it does not matter."""
    if content is None:
        yield f'<rect class="none" x="{x}" y="{y}" width="{RANKS * CELL}" height="{ROW - 7}" rx="3"/>'
        return
    for place, (number, mask) in enumerate(zip(*content, strict=True)):
        left = x + place * CELL
        yield f'<rect class="cell" x="{left}" y="{y}" width="{CELL}" height="{ROW - 7}"/>'
        ranks = [rank for rank in range(RANKS) if mask >> rank & 1]
        stripe = (CELL - 4) / len(ranks)
        for part, rank in enumerate(ranks):
            yield (
                f'<rect x="{left + 2 + part * stripe:g}" y="{y + ROW - 14}" width="{stripe:g}" height="5"'
                f' fill="{COLOURS[rank]}"/>'
            )
        yield f'<text x="{left + CELL / 2:g}" y="{y + 15}">{number:02}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for collective in MOVES:
        (folder / f"collective-{collective}.svg").write_text(draw(collective))
