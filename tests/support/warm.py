"""Ranks that do not import torch: a server, which has imported it, forks them.

The import takes a rank longer than what most programs of the tests do. `serving` starts the server, and
``support.launch.mpirun(..., warm=True)`` starts ranks that ask it to fork them: mpirun starts `stand_in` as the rank,
which remains as the process that mpirun knows. What is forked runs the program as ``__main__``, and ends as an
interpreter does. Where there is no server, mpirun starts the program in the usual way.

For scripts and modules (``-m``) that import torch, in tests that are not about the start of a process; of Python's
options, only ``-W error``. Not inherited from the server: environment, folder, open files, arguments, warnings,
``sys.path``, the state of numpy's random numbers. Inherited, and the same on all ranks: the hashes of strings.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOCKET = "MPICOLL_TESTS_WARM"
"""The variable that contains the path of the server's socket."""

LIMIT = 1 << 17  # bytes of a request; most of it is the environment

MODULES = (
    "numpy",
    "mpi4py",
    "rich.progress",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch",
    "torch._dynamo",  # by DistributedDataParallel
    "torch.distributed.fsdp",
)
"""What the server imports before it forks for the first time. None of them starts a thread or initialises MPI."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Keep a server for the processes that are started meanwhile; end it, and what it has forked, afterwards."""
    if not hasattr(os, "pidfd_open") or SOCKET in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        path = str(Path(folder, "socket"))
        environ = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # mpicoll is for the ranks to import
        environ.pop("PYTHONPATH", None)
        with subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, env=environ) as process:
            assert process.stdin is not None
            os.environ[SOCKET] = path
            try:
                yield
            finally:
                del os.environ[SOCKET]
                process.stdin.close()


def prepare() -> None:
    """Have the server import what it has to, if there is one, before somebody waits for that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
        connection.connect(os.environ.get(SOCKET, "/nowhere"))
        connection.send(b"?")


@functools.cache
def start_options() -> tuple[str, ...]:
    """Options of Python with which a rank is forked; none where there is no server. Wait until the server can fork."""
    path = os.environ.get(SOCKET)
    if path is None:
        return ()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(100)  # a busy machine may take a minute for the imports
        try:
            connection.connect(path)
            connection.send(b"?")
            ready = connection.recv(1)
        except OSError:
            return ()
    return ("-I", "-S", str(Path(__file__).with_name("stand_in.py")), path) if ready else ()


def _serve(path: str) -> tuple[list[Any], list[int]]:
    """Fork until stdin is closed. Return in a forked process only: its request and its standard files."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    waits = selectors.DefaultSelector()
    waits.register(0, selectors.EVENT_READ)
    waits.register(listener, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # process and connection, by the descriptor of the process
    while True:
        key = waits.select()[0][0]  # one at a time, as it may make others void
        if key.fileobj == 0:
            for pid, _ in children.values():
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        elif key.fileobj is listener:
            connection = listener.accept()[0]
            request, files = _receive(connection)
            _import()
            if not files:
                _send(connection, 0)  # to start_options
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                for one in (listener, waits, connection, *(one for _, one in children.values())):
                    one.close()
                for descriptor in children:
                    os.close(descriptor)
                return json.loads(request), files
            for file in files:
                os.close(file)
            child = os.pidfd_open(pid)
            children[child] = pid, connection
            waits.register(child, selectors.EVENT_READ)
            waits.register(connection, selectors.EVENT_READ, pid)
            _send(connection, pid)
        elif key.fileobj in children:
            pid, connection = children.pop(key.fileobj)
            waits.unregister(key.fileobj)
            os.close(key.fileobj)
            if connection in waits.get_map():
                waits.unregister(connection)
            _send(connection, os.waitpid(pid, 0)[1])
            connection.close()
        else:
            waits.unregister(key.fileobj)
            os.kill(key.data, signal.SIGKILL)  # the stand-in was killed


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    connection.settimeout(30)
    try:
        request, files, _, _ = socket.recv_fds(connection, LIMIT, 3)
    except OSError:
        return b"", []
    return request, files


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the stand-in was killed; its connection is the next event
        connection.send(str(number).encode())


def _import() -> None:
    for name in MODULES:
        if name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()


def _run(path: list[str], request: list[Any], files: list[int]) -> None:
    """Be the process that the request describes. `path` is the part of ``sys.path`` that all programs have."""
    arguments, environ, folder, cores = request
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setpgid(0, 0)
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])
        del arguments[:2]
    named = arguments[0] == "-m"
    sys.argv = arguments[named:]
    first = folder if named else str(Path(sys.argv[0]).parent)
    sys.path[:] = [first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        torch._import_device_backends()
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    if named:
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
    else:
        program.__file__ = sys.argv[0]
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), vars(program))


if __name__ == "__main__":
    _run(sys.path[1:], *_serve(sys.argv[1]))
