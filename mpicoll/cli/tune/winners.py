"""The winners among measured algorithms, and the rules that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mpicoll.cli.bench.cases import Workload
from mpicoll.cli.tune.measure import HOPELESS
from mpicoll.engine.selection.query import SelectionQuery, get_tuned_class
from mpicoll.engine.selection.rules import format_range, merge_adjacent
from mpicoll.engine.selection.selector import unsupported_reasons

_SEGMENTS = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
"""Segment sizes, in bytes, with which ``shm_pipelined`` is measured."""

_MARGIN = 0.05
"""Fraction by which another algorithm must be faster than the untuned choice to replace it."""

_TIE = 0.02
"""Fraction of the best time within which the winner of the previous size wins again."""

_OPEN_BELOW, _OPEN_ABOVE = 1 << 10, 16 << 20
"""Bounds in bytes: a smallest size up to the first extends its rule to all smaller sizes, a largest size from the
second on extends its rule to all larger sizes."""


@dataclass(slots=True)
class TunedPoint:
    """A workload with the untuned choice, the medians that were measured, and the winner."""

    workload: Workload
    problem: SelectionQuery
    untuned: str
    medians: dict[str, float] = field(default_factory=dict)
    winner: str = ""

    def efficiency(self, name: str) -> float:
        return min(self.medians.values()) / self.medians[name]

    @property
    def tuned_class(self) -> str:

        name = get_tuned_class(self.problem)
        assert name is not None  # the ranks have met on their devices
        return name

    @property
    def where(self) -> str:
        """Description of the device models, if any, and of the layout of the ranks."""
        device, shape = self.problem.device, self.problem.context.layout
        return str(shape) if device is None else f"{device.models}, {shape}"


def list_candidates(point: TunedPoint, own: int) -> list[str]:
    """Return the names of all applicable algorithms, without duplicates; `own` are the bytes of a piece by default."""
    names = [name for name, refusal in unsupported_reasons(point.problem).items() if refusal is None]
    if "shm_pipelined" in names:
        names += [
            f"shm_pipelined/{format_range(0, one).removeprefix('0-')}"
            for one in _SEGMENTS
            if own != one <= point.workload.nbytes
        ]
    return list(dict.fromkeys([point.untuned, *names]))


def is_hopeless(ratios: Sequence[float]) -> bool:
    """Return True if `ratios`, times relative to the best at ascending sizes, exclude an algorithm from the looks."""
    return len(ratios) > 1 and min(ratios[-2:]) > HOPELESS and ratios[-1] > 0.9 * ratios[-2]


def choose_winner(medians: Mapping[str, float], untuned: str, previous: str) -> str:
    best = min(medians, key=lambda name: medians[name])
    if medians[best] > (1 - _MARGIN) * medians[untuned]:
        return untuned
    if medians.get(previous, float("inf")) <= (1 + _TIE) * medians[best]:
        return previous
    return best


def make_rules(points: Sequence[TunedPoint]) -> list[tuple[float, float, str]]:
    """Return the rules for the winners of points of ascending sizes."""
    sizes = [point.workload.nbytes for point in points]
    borders = [
        0.0 if sizes[0] <= _OPEN_BELOW else float(sizes[0]),
        *(_round_between(low, high) for low, high in pairwise(sizes)),
        # A barrier has no bytes, so its only size has been measured.
        float("inf") if sizes[-1] >= _OPEN_ABOVE or sizes[-1] == 0 else 2.0 * sizes[-1],
    ]
    return merge_adjacent(
        [(low, high, point.winner) for low, high, point in zip(borders, borders[1:], points, strict=False)]
    )


def _round_between(low: int, high: int) -> float:
    """Return a short round number near the geometric mean."""
    mean = int((low * high) ** 0.5)
    shift = max(0, mean.bit_length() - 3)
    return float(min(high, max(low + 1, mean >> shift << shift)))
