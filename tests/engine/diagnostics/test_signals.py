"""SIGINT. SIGTERM is among the cases of test_deaths."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Starter = Callable[..., "CompletedProcess[str]"]


@pytest.mark.slow
def test_an_interrupt_ends_the_job(job: Starter) -> None:
    done = job(
        3,
        """
import os, signal
if mpicoll.world().rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
mpicoll.barrier()
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 1 of 3 died of KeyboardInterrupt" in done.stdout
