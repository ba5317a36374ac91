"""What `mpicoll tune` has measured: the file, and how all ranks come to the same of it.

The file is JSON with an entry for each machine, MPI library and shape of communicators. One rank reads it, picks what
was measured on machines like its own with this MPI library, and gives that to the others: so ranks whose files or
variables differ choose alike.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll import user_cache
from mpicoll.config import config
from mpicoll.engine.selection.cost_model import TYPICAL, Costs, Link
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import UNTUNED, TunedTable, is_dtype_class
from mpicoll.engine.selection.rules import Rules, format_rules, overlay, parse_rules
from mpicoll.errors import SetupError
from mpicoll.transport.base import Transport

FORMAT = "mpicoll tuned table"
VERSION = 1

_LARGEST = 4 << 20
"""Bytes of a file that is read; one entry has a few thousand."""


class Unreadable(Exception):
    """A file is no table, and why."""


def default_path() -> Path | None:
    """Where the table is unless MPICOLL_TUNED says otherwise; None where there is no home directory."""
    return user_cache.cache_file("tuned.json")


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """What tells kinds of machines apart: the model of the processor and the number of cores."""
    model = ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "cpu model", "Hardware")):
                model = line.partition(":")[2].strip()
                break
    return {"cpu": model or platform.processor() or platform.machine(), "cores": os.cpu_count() or 1}


def share(transport: Transport, library: str, known: TunedTable | None = None) -> TunedTable:
    """Collective over `transport`, one of MPI's: the table that counts for all its ranks.

    It is rank 0's: `known` if that has one already, else what its variable and its file say for `library`. Raises
    SetupError on all ranks if MPICOLL_TUNED of rank 0 names a file that is no table; a broken one in the default place
    is left out, and rank 0 warns.
    """
    text = warning = ""
    if transport.rank == 0:
        text, warning = (known.text, "") if known is not None else _read(library)
    if transport.size > 1:
        text = _bcast(transport, text)
    table = _table(text)
    if warning:
        warnings.warn(warning, stacklevel=2)
    return table


def _bcast(transport: Transport, text: str) -> str:
    native = transport.native
    assert native is not None
    data = np.frombuffer(text.encode(), np.uint8).copy()
    length = np.array([data.size])
    native.bcast(length.view(np.uint8), 0)
    if length[0] == 0:
        return ""
    data = data if transport.rank == 0 else np.empty(length[0], np.uint8)
    native.bcast(data, 0)
    return bytes(data).decode()


@lru_cache(maxsize=4)
def _read(library: str) -> tuple[str, str]:
    """What this process' variable and file say: what the others are told, and a warning, or ""."""
    named = config().tuned
    if named == "off":
        return "", ""
    path = Path(os.path.expanduser(named)) if named else default_path()  # noqa: PTH111  this one raises nothing
    # On most machines nothing was tuned. What may not even be looked for isn't there.
    if path is None or not (named or os.path.exists(path)):  # noqa: PTH110  nor does this one
        return "", ""
    try:
        entries = [one for one in load(path) if one["machine"] == machine() and one["mpi"] == library]
    except Unreadable as error:
        if not named:
            return "", f"{path} is left out, since it {error}; write it anew by `mpicoll tune`, or remove it"
        problem = f"MPICOLL_TUNED={named!r}: it {error}; write it by `mpicoll tune`, or set MPICOLL_TUNED=off"
        return json.dumps({"error": problem}), ""
    return (json.dumps({"source": str(path), "entries": entries}), "") if entries else ("", "")


def load(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, checked. Raises Unreadable, with a message that goes after "it"."""
    try:
        if not path.is_file():
            raise Unreadable("is no file" if path.exists() else "does not exist")
        if path.stat().st_size > _LARGEST:
            raise Unreadable(f"has more than {_LARGEST >> 20} MiB, which no table has")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Unreadable("is no table of mpicoll's")
    if content.get("version") != VERSION:
        raise Unreadable(f"is of version {content.get('version')!r}, and this mpicoll reads {VERSION}")
    try:
        entries = list(content["entries"])
        for entry in entries:
            _checked(entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"holds what this mpicoll does not understand ({type(error).__name__}: {error})") from error
    return entries


def _checked(entry: dict[str, Any]) -> None:
    """Raises one of many errors if it is no entry."""
    _shape(entry)
    _costs(entry["costs"])
    if not isinstance(entry["machine"], dict) or not isinstance(entry["mpi"], str):
        raise TypeError("machine and mpi say where it was measured")
    for kind, text in entry["rules"].items():
        if not is_dtype_class(kind):
            raise ValueError(f"no class of dtypes {kind!r}")
        parse_rules(text)


def _shape(entry: dict[str, Any]) -> NodeLayout:
    shape = NodeLayout(*(entry[name] for name in ("ranks", "nodes", "per_node")))
    if not all(type(number) is int and number > 0 for number in (shape.ranks, shape.nodes, shape.per_node)):
        raise TypeError(f"{shape} is no shape")
    return shape


def _costs(entry: dict[str, Any] | None) -> Costs | None:
    if entry is None:
        return None
    links = {name: None if entry[name] is None else Link(*map(_cost, entry[name])) for name in ("node", "network")}
    gamma = _cost(entry["gamma"])
    return Costs(links["node"] or TYPICAL.node, links["network"] or TYPICAL.network, gamma, measured=True)


def _cost(value: Any) -> float:
    if not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise TypeError(f"{value!r} is no time")
    return float(value)


@lru_cache(maxsize=8)
def _table(text: str) -> TunedTable:
    """What a rank was told, as one object, however often it is told. Raises SetupError if that is an error."""
    if not text:
        return UNTUNED
    told = json.loads(text)
    if "error" in told:
        raise SetupError(told["error"])
    return table_of(told["entries"], told["source"], text)


def table_of(entries: list[dict[str, Any]], source: str, text: str = "") -> TunedTable:
    """The table that entries of one machine and MPI library make."""
    rules = {_shape(entry): {kind: parse_rules(one) for kind, one in entry["rules"].items()} for entry in entries}
    # A link is best measured where it was measured last; most entries have only seen the inside of a node.
    node = network = None
    gamma = TYPICAL.gamma
    for entry in entries:
        if entry["costs"] is not None:
            costs = _costs(entry["costs"])
            assert costs is not None
            node = costs.node if entry["costs"]["node"] is not None else node
            network = costs.network if entry["costs"]["network"] is not None else network
            gamma = costs.gamma
    measured = node is not None or network is not None
    return TunedTable(text, source, rules, Costs(node or TYPICAL.node, network or TYPICAL.network, gamma, measured))


def entry_of(
    library: str, shape: NodeLayout, rules: dict[str, Rules], costs: dict[str, Any] | None, measured: str
) -> dict[str, Any]:
    """An entry for this machine. `costs` has ``node`` and ``network``, each alpha and beta or None, and ``gamma``."""
    return {
        "machine": machine(),
        "mpi": library,
        "ranks": shape.ranks,
        "nodes": shape.nodes,
        "per_node": shape.per_node,
        "measured": measured,
        "rules": {kind: format_rules(one) for kind, one in rules.items()},
        "costs": costs,
    }


_KEY = ("machine", "mpi", "ranks", "nodes", "per_node")


def merged(entries: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """`entries` with what `new` has measured, behind all others: of the same machine, MPI and shape, what it has not
    measured stays."""
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
    """Add an entry to a file, which is replaced as a whole. Raises SetupError if it is there and no table, or can't be
    written."""
    entries = merged(existing(path), new)
    content = json.dumps({"format": FORMAT, "version": VERSION, "entries": entries}, indent=1)
    try:
        user_cache.write_atomically(path, content + "\n")
    except OSError as error:
        raise SetupError(f"tune: {path} can't be written: {error.strerror}; pass another place by --output") from error


def existing(path: Path) -> list[dict[str, Any]]:
    """The entries of a file to which others are to be added. Raises SetupError if it is there and no table."""
    if not path.exists():
        return []
    try:
        return load(path)
    except Unreadable as error:
        raise SetupError(f"tune: {path} {error}; remove it, or pass another place by --output") from error
