"""Arguments of ``mpicoll tune``."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mpicoll.cli import formatting
from mpicoll.cli.bench import device_arrays
from mpicoll.cli.bench.cases import COLLECTIVES, DTYPES
from mpicoll.cli.bench.device_arrays import LibraryName
from mpicoll.engine.selection import tuned_table
from mpicoll.errors import ArgumentError, SetupError


@dataclass(slots=True)
class TuneSettings:
    """The validated arguments. `progress` and `width` describe the terminal of the process that parsed them; `quiet` is
    True if nothing but JSON is to be written to stdout."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    array: LibraryName | None
    seconds: float
    blocks: int | None
    output: Path | None
    check: bool
    progress: bool
    quiet: bool = False
    width: int = 0


def parse_settings(args: argparse.Namespace) -> TuneSettings:
    dtypes = tuple(args.dtypes.split(","))
    array = device_arrays.select_library("tune", args.device, args.array, dtypes)
    every = COLLECTIVES if array is None else tuple(name for name in COLLECTIVES if name != "barrier")
    collectives = every if args.collectives in ([], ["all"]) else tuple(args.collectives)
    for what, names, known in (("collective", collectives, every), ("dtype", dtypes, DTYPES)):
        for name in names:
            if name not in known:
                place = " on a device" if name in COLLECTIVES else ""
                raise ArgumentError(f"tune: no {what} {name!r}{place}; there are {', '.join(known)}")
    if "bfloat16" in dtypes and find_spec("torch") is None and find_spec("ml_dtypes") is None:
        raise SetupError("tune: bfloat16 needs torch or ml_dtypes, and neither is installed; leave it out of --dtypes")
    for option, number, least in (("factor", args.factor, 2), ("blocks", args.blocks or 1, 1)):
        if number < least:
            raise ArgumentError(f"tune: --{option} must be at least {least}, got {number}")
    for option, number in (("seconds", args.seconds), ("limit", args.limit)):
        if not 0 < number < float("inf"):
            raise ArgumentError(f"tune: --{option} must be a positive number of seconds, got {number}")
    try:
        sizes = tuple(formatting.sizes(args.sizes, args.factor))
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"--sizes: {error}") from error
    output = None if args.dry_run else _find_output(args.output)
    return TuneSettings(
        *(collectives, sizes, dtypes, array, args.seconds, args.blocks, output, bool(args.check)),
        progress=formatting.shows_progress(args.json),
        quiet=args.json == "-",
    )


def _find_output(wanted: Path | None) -> Path:
    """Return the path of the table. Raise before the measurement, not after it, if it cannot be written there."""
    named = os.environ.get("MPICOLL_TUNED", "off")
    output = wanted or (tuned_table.get_default_path() if named in ("", "off") else Path(named).expanduser())
    if output is None:
        raise SetupError("tune: there is no home directory to write to; pass --output")
    output = output.absolute()
    folder = next(one for one in output.parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ArgumentError(f"tune: {output}: nothing can be written to {folder}; pass another path with --output")
    return output


def parse_ranks(text: str | None) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(part.isdigit() and int(part) for part in parts):
        raise ArgumentError(f"tune: -np {text}: must be numbers of ranks, such as 2 or 2,4")
    return tuple(map(int, parts))
