"""torchft's replicas on groups of mpicoll, also after one of them has died."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.launch import ROOT
from torchft.coordination import LighthouseServer

REPLICAS = 3


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """Address of the server that decides which replicas take part."""
    server = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS - 1, join_timeout_ms=60_000)
    yield server.address()
    server.shutdown()


@pytest.mark.parametrize(("kind", "left"), [("manager", REPLICAS - 1), ("ddp", REPLICAS)])
def test_training(kind: str, left: int, lighthouse: str) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = []
    for replica in range(REPLICAS):
        command = [sys.executable, "ci/integrations/torchft_training.py", kind, str(replica), str(REPLICAS)]
        command = ["timeout", "100", *command, str(store.port), lighthouse]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * REPLICAS, outputs
    for rank in range(left):
        assert any(f"replica {rank} of {left}\n" in output for output in outputs)
