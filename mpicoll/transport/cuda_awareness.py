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

_RELEVANT_SETTINGS = ("OMPI_MCA_", "UCX_", "FI_", "MPICH_", "MPIR_CVAR_", "MV2_USE_")
"""Prefixes of settings of MPI libraries that may affect the result."""

_IRRELEVANT_SETTINGS = ("OMPI_MCA_osc", "OMPI_MCA_rmaps_", "OMPI_MCA_hwloc_", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME")
"""Prefixes of some of those settings that do not affect the result, or that a launcher sets for its ranks."""


@dataclass(frozen=True, slots=True)
class CudaSupport:
    """The classes of operations for which MPI accepts device memory, the evidence for each, and its source."""

    send: bool
    move: bool
    reduce: bool
    evidence: dict[str, str]
    source: str


@dataclass(frozen=True, slots=True)
class _ClassResult:
    """The test of a class: its result and the evidence. `possible` is False if the class could not be tried."""

    good: bool
    evidence: str
    possible: bool = True


_lock = threading.Lock()
_cached: CudaSupport | None = None
"""The result of this process, if it has been determined."""

_UNKNOWN = "not probed"


def find_cuda_support(program: str | None, *, fresh: bool = False) -> CudaSupport:
    """Return the operations that MPI can do on device memory.

    The result is that of MPICOLL_CUDA_AWARE; else that found before on such a machine; else, if `program` is not
    None, that found now by this module of probes, which takes some seconds, and a minute and a half at worst; else
    nothing. `fresh` tries again, even if a result is known. Not collective: the results of ranks may differ.
    """
    global _cached  # noqa: PLW0603  each message queries it
    setting = _parse_setting(config().cuda_aware)
    if setting is not None:
        return setting
    known = _cached
    if known is not None and not fresh and (known.source != _UNKNOWN or program is None):
        return known  # without waiting for a thread that runs the probes
    with _lock:
        if _cached is None:
            _cached = _read(_read_conditions()) or _make_no_support(_UNKNOWN, _UNKNOWN)
        if program is not None and (fresh or _cached.source == _UNKNOWN):
            _cached = _probe_all(program, _read_conditions())
        return _cached


@lru_cache(maxsize=4)
def _parse_setting(text: str) -> CudaSupport | None:
    """Return the verdict that MPICOLL_CUDA_AWARE specifies; None if it specifies none."""
    if text == "auto":
        return None
    words = text.split(",")
    source = f"MPICOLL_CUDA_AWARE={text}"
    return _make_support(
        {name: text == "on" or name in words for name in CLASSES}, dict.fromkeys(CLASSES, source), source
    )


def _make_support(good: Mapping[str, bool], evidence: Mapping[str, str], source: str) -> CudaSupport:
    return CudaSupport(good["send"], good["move"], good["reduce"], {name: evidence[name] for name in CLASSES}, source)


def _make_no_support(why: str, source: str) -> CudaSupport:
    return _make_support(dict.fromkeys(CLASSES, False), dict.fromkeys(CLASSES, why), source)


def _read_conditions() -> dict[str, Any]:
    """Return the conditions on which a verdict depends."""
    settings = {
        name: value
        for name, value in launcher.local_job_environment(os.environ, root=False).items()
        if name.startswith(_RELEVANT_SETTINGS) and not name.startswith(_IRRELEVANT_SETTINGS)
    }
    library = launcher.find_library()
    return {
        "machine": platform.machine(),
        **_read_gpus(),
        "mpi": library if isinstance(library, str) else library.version,
        "library": "" if isinstance(library, str) else library.path,
        "mpi4py": "" if isinstance(library, str) else library.mpi4py,
        "settings": settings,
    }


def _read_gpus() -> dict[str, Any]:
    """Return the models of the devices and the version of the driver, where /proc lists them."""
    driver, models = "", set()
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
        for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("Model:"):
                    models.add(line.partition(":")[2].strip())
    return {"gpus": sorted(models), "driver": driver}


def _probe_all(module: str, depends: dict[str, Any]) -> CudaSupport:
    """Try all classes, and keep the results for later runs."""
    program = launcher.find_launcher()
    if program is None:
        return _make_no_support(
            f"there is neither mpirun nor mpiexec, in PATH or beside Python and MPI, to try it; {_REMEDY}",
            "can't be tried",
        )
    tried: dict[str, _ClassResult] = {}
    for name in CLASSES:
        tried[name] = _probe_class(program, module, name)
        if not tried[name].possible:
            return _make_no_support(f"it can't be tried: {tried[name].evidence}", "can't be tried")
    good = {name: one.good for name, one in tried.items()}
    evidence = {name: one.evidence for name, one in tried.items()}
    entry = {**depends, "good": good, "evidence": evidence, "tried": strftime("%Y-%m-%d %H:%M:%S")}
    return _make_support(good, evidence, f"tried now, {_FILE.write(entry)}")


_REMEDY = "if it accepts device memory, set MPICOLL_CUDA_AWARE"


def _probe_class(program: str, module: str, name: str) -> _ClassResult:
    ended = launcher.run_bounded(
        [program, "-np", "2", *launcher.module_command(module, name)],
        launcher.local_job_environment(os.environ, root=os.geteuid() == 0),
        _SECONDS,
    )
    reports = probes.merge_reports(ended.output)
    if "unable" in reports:
        return _ClassResult(False, reports["unable"], possible=False)
    if "wrong" in reports:
        return _ClassResult(False, reports["wrong"])
    if ended.status == 0 and "done" in reports:
        return _ClassResult(True, reports["done"])
    how = f"no end within {_SECONDS:g} s" if ended.status is None else f"status {ended.status}"
    failure = probes.describe_failure(ended)
    if "step" not in reports:
        # The job failed before the first operation, so this is no evidence about device memory.
        return _ClassResult(False, f"{program}: {how}: {failure}", possible=False)
    where = "at its end" if "done" in reports else f"in {reports['step']}"
    return _ClassResult(False, f"{how}, {where}: {failure}")


def cache_path() -> Path | None:
    """Return the file in which verdicts are kept; None where there is no home directory."""
    return _FILE.path


def _read(depends: dict[str, Any]) -> CudaSupport | None:
    """Return the verdict that was found before, or None."""
    entry = _FILE.read(depends)
    if entry is None:
        return None
    return _make_support(entry["good"], entry["evidence"], f"tried on {entry['tried']}, from {cache_path()}")


def _is_valid(entry: Mapping[str, Any]) -> bool:
    good, evidence = entry.get("good"), entry.get("evidence")
    return (
        isinstance(entry.get("tried"), str)
        and isinstance(good, dict)
        and isinstance(evidence, dict)
        and all(isinstance(good.get(name), bool) and isinstance(evidence.get(name), str) for name in CLASSES)
    )


_FILE = user_cache.Entries("cuda-aware.json", FORMAT, VERSION, ("good", "evidence", "tried"), _is_valid)
