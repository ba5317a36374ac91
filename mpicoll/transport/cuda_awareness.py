"""Test if this MPI library accepts device memory.

The information that a library gives about itself is wrong in both directions, and one that does not accept device
memory crashes the process that tries. So two ranks of a separate job try it, for each class of operations, and the
results are kept for later runs, in a JSON file with an entry for each kind of device, driver, MPI library and settings.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import strftime
from typing import Any

from mpicoll import user_cache
from mpicoll.config import CUDA_AWARE, config
from mpicoll.transport import launcher, probes

CLASSES = CUDA_AWARE
"""The classes of operations.

They are messages between two ranks, also those that are completed by a thread which has never used a device, as the
engine's poller has not; collectives that move data; and collectives that reduce.
"""

FORMAT = "mpicoll CUDA-aware MPI"
VERSION = 2

_SECONDS = 30.0
"""Maximum seconds for the test of a class."""

_MATTERS = ("OMPI_MCA_", "UCX_", "FI_", "MPICH_", "MPIR_CVAR_", "MV2_USE_")
"""Prefixes of settings of MPI libraries that may affect the result."""

_NO_MATTER = ("OMPI_MCA_osc", "OMPI_MCA_rmaps_", "OMPI_MCA_hwloc_", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
"""Prefixes of some of those settings that do not affect the result, or that a launcher sets for its ranks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The classes of operations for which MPI accepts device memory, the evidence for each, and its source."""

    send: bool
    move: bool
    reduce: bool
    evidence: dict[str, str]
    source: str


@dataclass(frozen=True, slots=True)
class _Tried:
    """The test of a class: its result and the evidence. `possible` is False if the class could not be tried."""

    good: bool
    evidence: str
    possible: bool = True


_lock = threading.Lock()
_known: Verdict | None = None
"""The result of this process, if it has been determined."""

_UNKNOWN = "not probed"


def verdict(program: str | None, *, fresh: bool = False) -> Verdict:
    """Return the operations that MPI can do on device memory.

    The result is that of MPICOLL_CUDA_AWARE; else that found before on such a machine; else, if `program` is not
    None, that found now by this module of probes, which takes some seconds, and a minute and a half at worst; else
    nothing. `fresh` tries again, even if a result is known. Not collective: the results of ranks may differ.
    """
    global _known  # noqa: PLW0603  messages ask for it, one by one
    asked = _asked(config().cuda_aware)
    if asked is not None:
        return asked
    known = _known
    if known is not None and not fresh and (known.source != _UNKNOWN or program is None):
        return known  # without waiting for a thread that runs the probes
    with _lock:
        if _known is None:
            _known = _read(_depends()) or _nothing(_UNKNOWN, _UNKNOWN)
        if program is not None and (fresh or _known.source == _UNKNOWN):
            _known = _probe(program, _depends())
        return _known


@lru_cache(maxsize=4)
def _asked(text: str) -> Verdict | None:
    """Return the verdict that MPICOLL_CUDA_AWARE specifies; None if it specifies none."""
    if text == "auto":
        return None
    words = text.split(",")
    source = f"MPICOLL_CUDA_AWARE={text}"
    return _made({name: text == "on" or name in words for name in CLASSES}, dict.fromkeys(CLASSES, source), source)


def _made(good: Mapping[str, bool], evidence: Mapping[str, str], source: str) -> Verdict:
    return Verdict(good["send"], good["move"], good["reduce"], {name: evidence[name] for name in CLASSES}, source)


def _nothing(why: str, source: str) -> Verdict:
    return _made(dict.fromkeys(CLASSES, False), dict.fromkeys(CLASSES, why), source)


def _depends() -> dict[str, Any]:
    """Return the conditions on which a verdict depends."""
    settings = {
        name: value
        for name, value in launcher.environment_here(os.environ, root=False).items()
        if name.startswith(_MATTERS) and not name.startswith(_NO_MATTER)
    }
    library = launcher.library()
    return {
        "machine": platform.machine(),
        **_gpus(),
        "mpi": library if isinstance(library, str) else library.version,
        "library": "" if isinstance(library, str) else library.path,
        "mpi4py": "" if isinstance(library, str) else library.mpi4py,
        "settings": settings,
    }


def _gpus() -> dict[str, Any]:
    """Return the models of the devices and the version of the driver, where /proc lists them."""
    driver, models = "", set()
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
        for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("Model:"):
                    models.add(line.partition(":")[2].strip())
    return {"gpus": sorted(models), "driver": driver}


def _probe(module: str, depends: dict[str, Any]) -> Verdict:
    """Try all classes, and keep the results for later runs."""
    program = launcher.find()
    if program is None:
        return _nothing(
            f"there is neither mpirun nor mpiexec, in PATH or beside Python and MPI, to try it; {_SAY}",
            "can't be tried",
        )
    tried: dict[str, _Tried] = {}
    for name in CLASSES:
        tried[name] = _try(program, module, name)
        if not tried[name].possible:
            return _nothing(f"it can't be tried: {tried[name].evidence}", "can't be tried")
    good = {name: one.good for name, one in tried.items()}
    evidence = {name: one.evidence for name, one in tried.items()}
    entry = {**depends, "good": good, "evidence": evidence, "tried": strftime("%Y-%m-%d %H:%M:%S")}
    return _made(good, evidence, f"tried now, {_FILE.write(entry)}")


_SAY = "if it does, say so by MPICOLL_CUDA_AWARE"


def _try(program: str, module: str, name: str) -> _Tried:
    ended = launcher.attempt(
        [program, "-np", "2", *launcher.module(module, name)],
        launcher.environment_here(os.environ, root=os.geteuid() == 0),
        _SECONDS,
    )
    told = probes.merged_reports(ended.output)
    if "unable" in told:
        return _Tried(False, told["unable"], possible=False)
    if "wrong" in told:
        return _Tried(False, told["wrong"])
    if ended.status == 0 and "done" in told:
        return _Tried(True, told["done"])
    how = f"no end within {_SECONDS:g} s" if ended.status is None else f"status {ended.status}"
    said = probes.failure_text(ended)
    if "step" not in told:
        # The job failed before the first operation, so this is no evidence about device memory.
        return _Tried(False, f"{program}: {how}: {said}", possible=False)
    where = "at its end" if "done" in told else f"in {told['step']}"
    return _Tried(False, f"{how}, {where}: {said}")


def cache() -> Path | None:
    """Return the file in which verdicts are kept; None where there is no home directory."""
    return _FILE.path


def _read(depends: dict[str, Any]) -> Verdict | None:
    """Return the verdict that was found before, or None."""
    entry = _FILE.read(depends)
    if entry is None:
        return None
    return _made(entry["good"], entry["evidence"], f"tried on {entry['tried']}, from {cache()}")


def _understood(entry: Mapping[str, Any]) -> bool:
    good, evidence = entry.get("good"), entry.get("evidence")
    return (
        isinstance(entry.get("tried"), str)
        and isinstance(good, dict)
        and isinstance(evidence, dict)
        and all(isinstance(good.get(name), bool) and isinstance(evidence.get(name), str) for name in CLASSES)
    )


_FILE = user_cache.Entries("cuda-aware.json", FORMAT, VERSION, ("good", "evidence", "tried"), _understood)
