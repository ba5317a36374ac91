"""DeepSpeed, in each stage of ZeRO, which makes the process group or takes the program's."""

from __future__ import annotations

import socket

import pytest
from support.launch import mpirun


def find_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("size", "stage", "makes_group"), [(2, 0, False), (2, 1, True), (3, 2, False), (3, 3, True)])
def test_training(size: int, stage: int, makes_group: bool) -> None:
    port = [str(find_port())] if makes_group else []
    command = ["ci/integrations/deepspeed_training.py", str(stage), *port]
    # Open MPI numbers the ranks of a node by sockets otherwise.
    options = ["--map-by", "slot:oversubscribe"]
    done = mpirun(size, *command, options=options, seconds=100, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
