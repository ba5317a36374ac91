"""The file of results of `mpicoll tune`, and its distribution to all ranks.

The file is JSON with an entry for each machine, MPI library and layout of communicators. Rank 0 reads it, selects the
entries of its own machine and MPI library, and broadcasts them. So all ranks use the same table, even if their files or
environment variables differ.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from mpicoll import atomic_files, user_cache
from mpicoll.config import config
from mpicoll.engine.selection.costs import TYPICAL, Costs, Link
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import UNTUNED, TunedTable, is_dtype_class
from mpicoll.engine.selection.rules import Rules, format_rules, overlay, parse_rules
from mpicoll.errors import SetupError
from mpicoll.proc_files import read_file

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "mpicoll tuned table"
VERSION = 1

_LARGEST = 4 << 20
"""Largest size of a file in bytes; one entry has a few thousand."""


class InvalidTable(Exception):
    """Raised if a file is not a valid table; the message is a predicate with the file as its subject."""


def get_default_path() -> Path | None:
    """Return the path of the table if MPICOLL_TUNED is not set; None if there is no home directory."""
    return user_cache.cache_file("tuned.json")


@lru_cache(maxsize=1)
def describe_machine() -> dict[str, Any]:
    """Return the properties that identify a kind of machine: the model of the processor and the number of cores."""
    model = ""
    with suppress(OSError):
        for line in read_file("/proc/cpuinfo").splitlines():
            if line.startswith(("model name", "cpu model", "Hardware")):
                model = line.partition(":")[2].strip()
                break
    return {"cpu": model or platform.processor() or platform.machine(), "cores": os.cpu_count() or 1}


def share(
    rank: int, exchange: Callable[[str], Sequence[str]], library: str, known: TunedTable | None = None
) -> TunedTable:
    """Return the table of rank 0 on all ranks. Collective. ``exchange(text)`` returns the texts of all ranks, by rank.

    The table is `known` on rank 0 if that is not None, otherwise the one that its environment variable and its file
    specify for `library`. Raises SetupError on all ranks if MPICOLL_TUNED of rank 0 names a file that is not a valid
    table. An invalid file at the default path is ignored, with a warning on rank 0.
    """
    text = warning = ""
    if rank == 0:
        text, warning = (known.text, "") if known is not None else _read(library)
    table = _parse_table(exchange(text)[0])
    if warning:
        warnings.warn(warning, stacklevel=2)
    return table


@lru_cache(maxsize=4)
def _read(library: str) -> tuple[str, str]:
    """Return the text to broadcast, from this process' environment variable and file, and a warning; "" for none."""
    named = config().tuned
    if named == "off":
        return "", ""
    found = os.path.expanduser(named) if named else user_cache.locate_file("tuned.json")  # noqa: PTH111  raises nothing
    # On most machines nothing was tuned. A path without permission for a look-up counts as missing.
    if found is None or not (named or os.path.exists(found)):  # noqa: PTH110  nor does this one
        return "", ""
    from pathlib import Path  # late: on most machines nothing was tuned

    path = Path(found)
    try:
        entries = [one for one in load(path) if one["machine"] == describe_machine() and one["mpi"] == library]
    except InvalidTable as error:
        if not named:
            return "", f"{path} is ignored, since it {error}; run `mpicoll tune` to write it again, or remove it"
        problem = f"MPICOLL_TUNED={named!r}: it {error}; run `mpicoll tune` to write it, or set MPICOLL_TUNED=off"
        return json.dumps({"error": problem}), ""
    return (json.dumps({"source": str(path), "entries": entries}), "") if entries else ("", "")


def load(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file. Raises InvalidTable."""
    try:
        if not path.is_file():
            raise InvalidTable("is not a regular file" if path.exists() else "does not exist")
        if path.stat().st_size > _LARGEST:
            raise InvalidTable(f"has more than {_LARGEST >> 20} MiB, the limit for a table")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidTable(f"can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidTable(f"is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidTable("is not a table of mpicoll")
    if content.get("version") != VERSION:
        raise InvalidTable(f"has version {content.get('version')!r}, but this mpicoll supports version {VERSION}")
    try:
        entries = list(content["entries"])
        for entry in entries:
            _check_entry(entry)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidTable(f"has an invalid entry ({type(error).__name__}: {error})") from error
    return entries


def _check_entry(entry: dict[str, Any]) -> None:
    """Raise KeyError, TypeError, ValueError, AttributeError or ArithmeticError if `entry` is invalid."""
    _parse_layout(entry)
    _parse_costs(entry["costs"])
    if not isinstance(entry["machine"], dict) or not isinstance(entry["mpi"], str):
        raise TypeError("machine must be a dict and mpi a str")
    for kind, text in entry["rules"].items():
        if not is_dtype_class(kind):
            raise ValueError(f"unknown class of dtypes {kind!r}")
        parse_rules(text)


def _parse_layout(entry: dict[str, Any]) -> NodeLayout:
    shape = NodeLayout(*(entry[name] for name in ("ranks", "nodes", "per_node")))
    if not all(type(number) is int and number > 0 for number in (shape.ranks, shape.nodes, shape.per_node)):
        raise TypeError(f"{shape} is not a layout of ranks")
    return shape


def _parse_costs(entry: dict[str, Any] | None) -> Costs | None:
    if entry is None:
        return None
    links = {
        name: None if entry[name] is None else Link(*map(_parse_cost, entry[name])) for name in ("node", "network")
    }
    gamma = _parse_cost(entry["gamma"])
    return Costs(links["node"] or TYPICAL.node, links["network"] or TYPICAL.network, gamma, measured=True)


def _parse_cost(value: Any) -> float:
    if not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise TypeError(f"{value!r} is not a time")
    return float(value)


@lru_cache(maxsize=8)
def _parse_table(text: str) -> TunedTable:
    """Return the table that a broadcast text holds, the same object for equal texts. Raises SetupError for an error."""
    if not text:
        return UNTUNED
    content = json.loads(text)
    if "error" in content:
        raise SetupError(content["error"])
    return make_table(content["entries"], content["source"], text)


def make_table(entries: list[dict[str, Any]], source: str, text: str = "") -> TunedTable:
    """Return the table of entries of one machine and MPI library."""
    rules = {
        _parse_layout(entry): {kind: parse_rules(one) for kind, one in entry["rules"].items()} for entry in entries
    }
    # The last measurement of a link is used; most entries have measured links within a node only.
    node = network = None
    gamma = TYPICAL.gamma
    for entry in entries:
        if entry["costs"] is not None:
            costs = _parse_costs(entry["costs"])
            assert costs is not None
            node = costs.node if entry["costs"]["node"] is not None else node
            network = costs.network if entry["costs"]["network"] is not None else network
            gamma = costs.gamma
    measured = node is not None or network is not None
    return TunedTable(text, source, rules, Costs(node or TYPICAL.node, network or TYPICAL.network, gamma, measured))


def make_entry(
    library: str, shape: NodeLayout, rules: dict[str, Rules], costs: dict[str, Any] | None, measured: str
) -> dict[str, Any]:
    """Return an entry for this machine. `costs` has ``node`` and ``network`` (alpha and beta, or None), ``gamma``."""
    return {
        "machine": describe_machine(),
        "mpi": library,
        "ranks": shape.ranks,
        "nodes": shape.nodes,
        "per_node": shape.per_node,
        "measured": measured,
        "rules": {kind: format_rules(one) for kind, one in rules.items()},
        "costs": costs,
    }


_KEY = ("machine", "mpi", "ranks", "nodes", "per_node")


def merge_entry(entries: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `entries` with `new` appended, which replaces the entries of the same machine, MPI and layout: results
    that `new` does not have are copied from them."""
    same = [one for one in entries if all(one[name] == new[name] for name in _KEY)]
    rules = {kind: parse_rules(text) for one in same for kind, text in one["rules"].items()}
    for kind, text in new["rules"].items():
        rules[kind] = overlay(parse_rules(text), rules.get(kind, ()))
    costs = new["costs"]
    for one in same:
        costs = costs or one["costs"]
    whole = {**new, "rules": {kind: format_rules(one) for kind, one in rules.items()}, "costs": costs}
    return [one for one in entries if one not in same] + [whole]


def write(path: Path, new: dict[str, Any]) -> None:
    """Add an entry to a file, which is replaced as a whole. Raises SetupError if it exists and is not a valid table, or
    can't be written."""
    entries = merge_entry(load_existing(path), new)
    content = json.dumps({"format": FORMAT, "version": VERSION, "entries": entries}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, content + "\n")
    except OSError as error:
        raise SetupError(f"tune: {path} can't be written: {error.strerror}; pass another path with --output") from error


def load_existing(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file, if it exists. Raises SetupError if it exists and is not a valid table."""
    if not path.exists():
        return []
    try:
        return load(path)
    except InvalidTable as error:
        raise SetupError(f"tune: {path} {error}; remove it, or pass another path with --output") from error
