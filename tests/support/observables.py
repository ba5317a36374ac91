"""A program independent of mpicoll that chooses a backend as Accelerate and Transformers' Trainer do, and trains.

It writes all state of torch.distributed that a program can see, and the result of the training, to
``FOLDER/NAME-RANK.json``. ``observables.py FOLDER NAME`` is for torchrun; with ``--spawn`` it writes its own state as
rank -1, and then starts two ranks by torch.multiprocessing.
"""

from __future__ import annotations

import atexit
import inspect
import io
import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ENTRANCES = (
    "mpicoll",
    "mpicoll.autoload",
    "mpicoll.backend_names",
    "mpicoll.legacy_autoload",
    "mpicoll.transport",
    "mpicoll.transport.launch_env",
)
"""The modules that an entry point needs."""


def main(folder: Path, name: str, *options: str) -> None:
    if not options:
        rank = int(os.environ["RANK"])
        write(folder, name, rank, seen() | trained(rank, int(os.environ["WORLD_SIZE"]), "env://"))
        return
    write(folder, name, -1, seen())
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (folder, name, port), 2)


def spawned(rank: int, folder: Path, name: str, port: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    write(folder, name, rank, seen() | trained(rank, 2, f"tcp://localhost:{port}"))


def write(folder: Path, name: str, rank: int, values: dict[str, Any]) -> None:
    (folder / f"{name}-{rank}.json").write_text(json.dumps(values, indent=1))


def seen() -> dict[str, Any]:
    """Return the state of torch.distributed before a process group is created."""
    backend = dist.Backend
    names = ("mpi", "gloo", "nccl", "ucc", "undefined", "MPI", "cpu:mpi,cuda:nccl", "of nobody")
    heard = io.StringIO()
    logging.basicConfig(stream=heard, level=logging.DEBUG)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = {
            "available": [dist.is_available(), dist.is_mpi_available(), dist.is_torchelastic_launched()],
            "backend available": {name: dist.is_backend_available(name) for name in names},
            "Backend()": {name: [str(backend(name)), type(backend(name)).__name__] for name in names},
            "BackendConfig": {name: repr(c10d.BackendConfig(backend(name))) for name in names},
            "default": [dist.get_default_backend_for_device(device) for device in ("cpu", "cuda")],
        }
    values = {name: value for name, value in vars(backend).items() if isinstance(value, str | list | dict)}
    # Some contain functions, whose addresses differ between processes.
    values = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in values.items()}
    values |= {name: repr(getattr(c10d, name)) for name in vars(c10d) if name.endswith("_AVAILABLE")}
    return found | {
        "values": values,
        "functions": {
            holder.__name__: functions(holder)
            for holder in (dist, c10d, backend, torch.nn.parallel.DistributedDataParallel)
        },
        "listener": [
            str(inspect.signature(backend.__new__)),
            backend.__new__.__module__,
            backend.__new__.__qualname__,
            pickle.loads(pickle.dumps(backend.__new__)) is backend.__new__,
            sorted(backend.__dict__),
        ],
        "pickled": [pickle.dumps(one).hex() for one in (dist.init_process_group, dist.new_group, c10d.rendezvous)],
        "warnings": [f"{one.filename}: {one.message}" for one in warned],
        "log": heard.getvalue(),
        "refused": [refusal(name) for name in ("of nobody", "gloo")],
        **surroundings(),
    }


def functions(holder: Any) -> dict[str, list[str]]:
    """Return the origin of each function of a module or class, without the listeners for backend names."""
    found = {}
    for name in sorted(dir(holder)):
        value = inspect.getattr_static(holder, name)
        if issubclass(type(value), classmethod | staticmethod):
            value = value.__func__
        if (holder, name) in ((dist.Backend, "__new__"), (dist, "is_mpicoll_available")):
            continue
        found[name] = [type(value).__qualname__]
        if type(value) is FunctionType:
            found[name] += [value.__module__, value.__qualname__, value.__code__.co_filename]
            found[name] += [str(inspect.signature(value))]
    return found


def refusal(backend: str) -> list[str]:
    """Return the error, with its frames, of init_process_group for a size without a rank."""
    try:
        dist.init_process_group(backend, store=dist.HashStore(), world_size=1)
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [repr(error), *(f"{frame.filename}:{frame.name}" for frame in frames)]
    raise AssertionError("it was not refused")


def surroundings() -> dict[str, Any]:
    """Return the state that a library could leave behind in a process."""
    packages = {module.partition(".")[0] for module in sys.modules if module not in ENTRANCES}
    return {
        "packages": sorted(packages - sys.stdlib_module_names - {"mpicoll"}),
        "modules of mpicoll": sorted(one for one in sys.modules if one.startswith("mpicoll.") and one not in ENTRANCES),
        "environment": dict(sorted((key, value) for key, value in os.environ.items() if key not in OF_THE_RUN)),
        "threads": threading.active_count(),
        "at exit": atexit._ncallbacks(),
        "excepthook": repr(sys.excepthook is sys.__excepthook__),
        "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
        "loggers": [repr(logging.getLogger(name)) for name in ("", "torch", "torch.distributed")],
    }


OF_THE_RUN = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def trained(rank: int, size: int, method: str) -> dict[str, Any]:
    """Return groups and gradients with the backend that Accelerate would choose."""
    several = int(os.environ.get("LOCAL_RANK", "-1")) != -1
    backend = "mpi" if several and dist.is_mpi_available() else "gloo"
    dist.init_process_group(backend, method, rank=rank, world_size=size)
    torch.manual_seed(7)
    weights = torch.randn(3, 2, requires_grad=True)
    losses = []
    for _ in range(3):
        loss = (torch.full((4, 3), rank + 1.0) @ weights).square().mean()
        (gradient,) = torch.autograd.grad(loss, weights)
        dist.all_reduce(gradient)
        with torch.no_grad():
            weights -= gradient / 10
        losses.append(loss.item())
    mixed = dist.new_group(backend="cpu:gloo,cuda:gloo")
    dist.broadcast(weights.detach(), 1, group=mixed)
    dist.monitored_barrier()
    groups = [dist.group.WORLD, mixed]
    found = {
        "backend": backend,
        "losses": losses,
        "weights": weights.tolist(),
        "groups": [[str(dist.get_backend(one)), type(one).__name__, c10d.get_backend_config(one)] for one in groups],
        "default backends": [backend_name(one) for one in groups],
        "afterwards": surroundings(),
    }
    dist.destroy_process_group()
    # With no backend named: what the detected accelerator's default is.
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(init_method=f"file://{folder}/alone", rank=0, world_size=1)
        found["unnamed"] = [str(dist.get_backend()), c10d.get_backend_config(dist.group.WORLD)]
        found["unnamed is"] = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        dist.destroy_process_group()
    return found


def backend_name(group: Any) -> str:
    """Return the name of the group's backend without a device, or the first line of the error."""
    try:
        return str(group.name())
    except RuntimeError as error:
        return str(error).splitlines()[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
