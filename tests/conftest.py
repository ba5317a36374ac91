"""What every test gets. Under ``mpirun -np N python -m pytest --with-mpi`` the ranks agree on each outcome."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from support import tiers, warm

from mpicoll.config import config
from mpicoll.extension import find_missing_reason

# A table that somebody has tuned for this machine must not change what the tests see.
os.environ.setdefault("MPICOLL_TUNED", "off")
# Tests count on calls that are bound from the second one on; those of learning ask for it.
os.environ.setdefault("MPICOLL_TUNE", "off")
# What goes wrong on purpose must not leave its report behind.
os.environ.setdefault("MPICOLL_REPORT", "off")

# Shared machines are slow at times: a slow example is no failure.
hypothesis.settings.register_profile("mpicoll", deadline=None)
# Every rank has to draw the same examples, so nothing may depend on a clock, on chance or on what was stored.
hypothesis.settings.register_profile(
    "mpicoll-mpi", deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)


# How much of the tests to run, by the option --tier.
pytest_addoption = tiers.pytest_addoption


FIRST = (
    *("transport/test_cuda_awareness.py", "test_autoload.py", "torch/test_endings.py", "torch/test_dropin.py"),
    *("torch/test_without_mpi.py", "transport/tcp/test_transport.py", "test_spawn.py"),
)
"""Files that take long, and would come late. A process of pytest-xdist gets a whole file at a time, in the order of the
tests, so those that come last run beside nothing. None of them depends much on what else the machine does, and at the
beginning that is most."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.pytest_collection_modifyitems(config, items)
    places = {Path(__file__).parent / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    missing = find_missing_reason()
    if missing is not None:
        for item in items:
            if item.get_closest_marker("extension") is not None:
                item.add_marker(pytest.mark.skip(f"needs the extension in C: {missing}"))


def pytest_configure(config: pytest.Config) -> None:
    tiers.pytest_configure(config)
    # What a collection of tests makes stays: to look for garbage in it takes a fifth of the time.
    gc.disable()
    with_mpi = config.getoption("--with-mpi")
    hypothesis.settings.load_profile("mpicoll-mpi" if with_mpi else "mpicoll")
    if with_mpi:
        from support.agree import Agreement

        _separate_temporary_directories()
        config.pluginmanager.register(Agreement(config), "agreement")
    else:
        server = contextlib.ExitStack()
        server.enter_context(warm.serving())
        config.add_cleanup(server.close)


def _separate_temporary_directories() -> None:
    """Give each rank a root of its own: at the end pytest removes old directories, and a rank fails if another one
    removes the same directory meanwhile."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK", "0")
    root = Path(tempfile.gettempdir()) / f"mpi-{os.getuid()}-{rank}"
    root.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


def pytest_collection_finish(session: pytest.Session) -> None:
    unstable = [item.nodeid for item in session.items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"ids that contain an address differ from worker to worker: {unstable}")
    # pytest adds a handler to each logger that does not pass its records on, six times a test: to dozens of torch's.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]:
        logging.getLogger(name).propagate = True
    # Thousands of tests stay until the end; each collection of garbage would look at them.
    gc.collect()
    gc.freeze()
    gc.enable()
    if hasattr(session.config, "workerinput"):
        warm.prepare()  # of several processes, which would all wait for it


@pytest.fixture(scope="session")
def together(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """For a block inside an mpi test that has to fail on all ranks if it fails on one.

    The end of a test is such a point anyway. A hypothesis test needs one in every example, so that the ranks shrink in
    step, instead of one rank alone, which would hang::

        @pytest.mark.mpi
        @given(size=integers(0, 100))
        def test_sum(together, size):
            with together():
                assert mpicoll.allreduce(np.ones(size)).sum() == ...
    """
    agreement = request.config.pluginmanager.get_plugin("agreement")
    return agreement.together if agreement else contextlib.nullcontext


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks of several nodes do not compare their calls, so that what differs goes on its way."""
    monkeypatch.setenv("MPICOLL_CHECK", "off")
    config.cache_clear()
    yield
    monkeypatch.undo()
    config.cache_clear()


@pytest.fixture
def cuda() -> Iterator[ModuleType]:
    """cupy; the fake one where there is no device. Gone afterwards, so that other tests see a machine without CUDA."""
    from support import fake_cuda

    cupy = fake_cuda.install()
    from mpicoll.engine.executors import peer_messages

    # The ranks of tests share a device: their messages are as between devices. Not by `monkeypatch`, which tests that
    # ask for it would then have before the fake, and undo after it.
    least, peer_messages.MIN_SHARED_BYTES = peer_messages.MIN_SHARED_BYTES, 0
    yield cupy
    peer_messages.MIN_SHARED_BYTES = least
    fake_cuda.remove()
