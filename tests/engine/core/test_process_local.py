"""Objects that can't be pickled or copied say so, and what to do; nothing half-made is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpicoll
from mpicoll.engine.core.queued_operation import QueuedOperation
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll

REMEDIES = {
    "Communicator": r"split\(\) or group\(ranks\)",
    "Plan": "_init function",
    "Request": "pass on its result",
    "Request of a message": "pass on its result",
    "process group": "get_process_group_ranks.*new_group",
    "Work": "pass on its tensors",
}


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python has ignored, as in a __del__."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    return seen


def test_pickling_and_copying_are_refused_with_a_remedy(unraisable: list[Any]) -> None:
    def body() -> None:
        world, x = mpicoll.world(), np.ones(3)
        group = ProcessGroupMpicoll(world.duplicate(), dist.HashStore(), timedelta(seconds=30))
        group.setGroupName("copied")
        tensor = torch.ones(3)
        objects: dict[str, Any] = {
            "Communicator": world,
            "Plan": mpicoll.allreduce_init(x),
            "Request": mpicoll.iallreduce(x),
            "Request of a message": mpicoll.isend(x, world.rank),
            "process group": group,
            "Work": group.allreduce([tensor]),
        }
        for name, one in objects.items():
            for refused in (pickle.dumps, copy.copy, copy.deepcopy):
                for holder in (one, {"nested": [one]}):
                    if refused is copy.copy and holder is not one:
                        continue  # a shallow copy holds the same object
                    with pytest.raises(TypeError, match=rf"{name.split(' of')[0]} can't.*{REMEDIES[name]}"):
                        refused(holder)
        # They are as they were.
        assert objects["Plan"]().tolist() == [world.size] * 3
        assert objects["Request"].wait().tolist() == [world.size] * 3
        assert objects["Work"].wait()
        assert tensor.tolist() == [world.size] * 3
        mpicoll.recv(x, world.rank)
        objects["Request of a message"].wait()
        group.shutdown()

    mpicoll.run_local(body, 2)
    gc.collect()
    assert unraisable == []


def test_an_operation_whose_making_was_interrupted_goes_silently(unraisable: list[Any]) -> None:
    job = QueuedOperation.__new__(QueuedOperation)
    del job
    gc.collect()
    assert unraisable == []


def test_a_failed_operation_goes_silently_at_the_end_of_the_interpreter() -> None:
    program = """
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
queue = OperationQueue(Group("0.0", "test", (0,), 0, 60.0), None, background=False, explain=lambda error: error)
kept = [queue.keep_failure(Call("a call"), ValueError())]
kept.append(kept)  # a cycle, which is collected when nothing can be imported any more
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
