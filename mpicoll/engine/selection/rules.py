"""Rules that name algorithms by collective and byte range: parse, format and combine them.

A rule reads ``allreduce:0-64k:native,64k-inf:ring``: byte ranges, lower end included, upper end not;
``allreduce:ring`` is short for ``allreduce:0-inf:ring``; ``chain/8`` asks for 8 pipeline segments; rules of several
collectives are separated by ``;``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeAlias

from mpicoll.engine.selection.catalogue import SHARED_MEMORY, canonical_name, check_name, collectives
from mpicoll.engine.selection.nbytes import format_bytes, parse_bytes
from mpicoll.errors import AlgorithmError

Rule: TypeAlias = tuple[float, float, str]
"""From, to (bytes), algorithm."""

Rules: TypeAlias = tuple[tuple[str, tuple[Rule, ...]], ...]
"""Rules by collective. A tuple, so that it can be a cache key."""


@lru_cache(maxsize=256)
def parse_rules(text: str) -> Rules:
    """Return the rules that `text` holds. Raises AlgorithmError that quotes the wrong part."""
    return tuple(_parse_collective(part.strip()) for part in text.split(";") if part.strip())


@lru_cache(maxsize=256)
def parse_built_in_rules(text: str, collective: str) -> Rules:
    """Return the rules for `collective` that the built-in `text` holds.

    The names in them are not looked up: the first call of a program rarely needs a schedule, and to load all schedules
    takes tens of milliseconds.
    """
    parts = (part.strip().partition(":") for part in text.split(";"))
    return tuple(
        (name, tuple(_parse_rule(name, part.strip()) for part in rest.split(",")))
        for name, _, rest in parts
        if name == collective
    )


def _parse_collective(text: str) -> tuple[str, tuple[Rule, ...]]:
    collective, colon, rest = text.partition(":")
    if not colon or not rest:
        raise AlgorithmError(f"rule {text!r}: expected collective:algorithm or collective:from-to:algorithm,...")
    if collective not in SHARED_MEMORY and collective not in collectives():
        raise AlgorithmError(f"rule {text!r}: no collective {collective!r}; there are {', '.join(collectives())}")
    rules = tuple(_parse_rule(collective, part.strip()) for part in rest.split(","))
    for _, _, name in rules:
        check_name(collective, name)
    return collective, rules


def _parse_rule(collective: str, text: str) -> Rule:
    extent, colon, name = text.rpartition(":")
    if not colon:
        low, high = 0.0, float("inf")
    else:
        match = re.fullmatch(r"(\w+)-(\w+)", extent)
        if match is None:
            raise AlgorithmError(f"rule {text!r} of {collective}: expected from-to:algorithm, such as 4k-1m:{name}")
        low, high = parse_bytes(match[1]), parse_bytes(match[2])
        if low >= high:
            raise AlgorithmError(f"rule {text!r} of {collective}: the range {extent} is empty")
    return low, high, canonical_name(name)


def format_rules(rules: Rules) -> str:
    """Return the text from which :func:`parse_rules` reads `rules`."""
    return ";".join(
        f"{collective}:{','.join(f'{format_range(low, high)}:{name}' for low, high, name in ranges)}"
        for collective, ranges in rules
    )


def format_range(low: float, high: float) -> str:
    """Return a range of bytes in the form that rules have: ``4k-1m``."""
    return f"{format_bytes(low)}-{format_bytes(high)}"


def overlay(new: Rules, old: Rules) -> Rules:
    """Return the rules of `new`, and those of `old` outside of its ranges."""
    ranges: dict[str, list[Rule]] = {}
    for collective, rules in old:
        ranges.setdefault(collective, []).extend(rules)
    for collective, rules in new:
        remaining = ranges.get(collective, [])
        for low, high, _ in rules:
            parts = [part for one in remaining for part in _outside(one, low, high)]
            remaining = [part for part in parts if part[0] < part[1]]
        ranges[collective] = merge_adjacent(sorted([*rules, *remaining]))
    return tuple((collective, tuple(rules)) for collective, rules in ranges.items())


def _outside(rule: Rule, low: float, high: float) -> tuple[Rule, Rule]:
    first, last, name = rule
    return (first, min(last, low), name), (max(first, high), last, name)


def merge_adjacent(rules: list[Rule]) -> list[Rule]:
    """Return `rules`, which are sorted, with adjacent ranges of one algorithm merged."""
    merged: list[Rule] = []
    for low, high, name in rules:
        if merged and merged[-1][1:] == (low, name):
            merged[-1] = (merged[-1][0], high, name)
        else:
            merged.append((low, high, name))
    return merged
