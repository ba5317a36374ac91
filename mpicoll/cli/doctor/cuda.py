"""CUDA devices, and which operations reach their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpicoll.cli import formatting
from mpicoll.cli.doctor import versions
from mpicoll.cli.doctor.findings import TIME_LIMIT, Finding, FindingState

_CUPY = "for CUDA arrays and tensors: pip install 'mpicoll[cuda12]', or cuda13, as the driver allows"
_STAGED = "data passes through page-locked memory of the host"


def check_cuda(probe: bool | None) -> Iterator[Finding]:
    """Yield findings on devices and access to their memory."""
    driver = _find_driver()
    if driver:
        yield Finding("CUDA", "driver", "ok", driver)
    else:
        yield Finding("CUDA", "driver", "not there", "there is no NVIDIA driver in /proc and /dev")
    if not versions.find_cupys():
        yield Finding("CUDA", "cupy", "not there", "not installed", _CUPY if driver else "")
        return
    found = _probe_device("devices")
    if "done" not in found:
        problem = found.get("unable") or found["failed"]
        state: FindingState = "problem" if driver else "not there"
        yield Finding("CUDA", "devices", state, problem, "see whether cupy fits the driver" if driver else "")
        return
    devices = found["done"]["devices"]
    first = devices[0]
    text = f"driver for CUDA {first['driver']}, cupy {first['cupy']} with CUDA {first['runtime']}"
    yield Finding("CUDA", "versions", "ok", text)
    for device in devices:
        yield Finding("CUDA", f"cuda:{device['index']}", "ok", _describe_device(device))
    yield check_kernels()
    yield check_ipc()
    yield check_stream_order()
    yield check_nccl(found["done"], len(devices))
    yield from _check_cuda_support(probe)


def _check_cuda_support(probe: bool | None) -> Iterator[Finding]:
    """Yield MPI's support of device memory, by class of operations."""
    from mpicoll.engine import cuda_probes
    from mpicoll.transport import cuda_awareness

    verdict = cuda_awareness.find_cuda_support(None if probe is False else cuda_probes.PROGRAM, fresh=probe is True)
    words = {"send": "messages", "move": "moving collectives", "reduce": "reductions"}
    for name in cuda_awareness.CLASSES:
        takes = getattr(verdict, name)
        yield Finding(
            "CUDA",
            f"MPI: {words[name]}",
            "ok" if takes else "not there",
            f"{'takes' if takes else 'takes no'} device memory: {verdict.evidence[name]}",
            "" if takes else _STAGED,
        )
    place = cuda_awareness.cache_path()
    kept = "" if place is None or str(place) in verdict.source else f"; the result is stored in {place}"
    yield Finding("CUDA", "MPI: known from", "ok", f"{verdict.source}{kept}")


def _describe_device(facts: dict[str, Any]) -> str:
    reach = ", ".join(f"cuda:{peer}" for peer in facts["peers"])
    return (
        f"{facts['name']}, {formatting.nbytes(facts['memory'])}, compute capability {facts['capability']}, bus"
        f" {facts['bus']}{', reaches ' if reach else ''}{reach}"
    )


def _find_driver() -> str:
    """Return the version of NVIDIA's driver, else the device files that exist."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
        return line.partition(":")[2].strip() or line
    except (OSError, IndexError):
        found = [str(one) for one in (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg")) if one.exists()]
        return ", ".join(found)


def _probe_device(name: str) -> dict[str, Any]:
    """Run a probe in a separate process and return its reports; ``failed`` if it ended without a result."""
    from mpicoll.engine import cuda_probes
    from mpicoll.transport import launcher, probes

    ended = launcher.run_bounded(launcher.module_command(cuda_probes.PROGRAM, name), os.environ, TIME_LIMIT)
    report = probes.merge_reports(ended.output)
    if not report.keys() & {"done", "wrong", "unable"}:
        late = f"no answer within {TIME_LIMIT:g} s"
        report["failed"] = late if ended.status is None else launcher.tail(ended.errors, 2)
    return report


def check_kernels() -> Finding:
    report = _probe_device("kernel")
    if "done" in report:
        return Finding("CUDA", "kernels", "ok", report["done"])
    from mpicoll.engine.cuda_probes import KERNEL_REMEDY

    return Finding("CUDA", "kernels", "problem", report.get("unable") or report["failed"], KERNEL_REMEDY)


def check_ipc() -> Finding:
    report = _probe_device("ipc")
    if "done" in report:
        return Finding("CUDA", "IPC", "ok", report["done"])
    if "unable" in report:
        remedy = f"{_STAGED} between ranks of a node; in containers the ranks must see each other's processes"
        return Finding("CUDA", "IPC", "not there", report["unable"], remedy)
    return Finding("CUDA", "IPC", "problem", report.get("wrong") or report["failed"], "please report it")


def check_stream_order() -> Finding:
    report = _probe_device("words")
    if "done" in report:
        return Finding("CUDA", "stream order", "ok", report["done"])
    if "unable" in report:
        return Finding("CUDA", "stream order", "not there", report["unable"], "MPICOLL_CUDA_ORDER=stream has no effect")
    return Finding("CUDA", "stream order", "problem", report.get("wrong") or report["failed"], "please report it")


def check_nccl(found: dict[str, Any], devices: int) -> Finding:
    if "nccl" in found:
        return Finding("CUDA", "NCCL", "ok", found["nccl"])
    remedy = "ranks with devices of their own take longer without it" if devices > 1 else ""
    return Finding("CUDA", "NCCL", "not there", found["no nccl"], remedy)
