"""all_reduce of sparse tensors: what concerns CUDA, of which torch needs no device here; its values are tested with the
other collectives."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

import mpicoll
from mpicoll.torch import sparse


def test_the_result_is_recorded_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an internal stream is not used again before the caller's stream has done its work on the result."""
    event = SimpleNamespace(wait=lambda: None)
    stream = SimpleNamespace(record_event=lambda: event)
    recorded: dict[int, object] = {}
    monkeypatch.setattr(sparse, "find_cuda_devices", lambda tensors: [torch.device("cuda", 0)])
    monkeypatch.setattr(sparse, "cuda_device", lambda operation, place, argument: None)
    monkeypatch.setattr(sparse, "on_internal_streams", lambda *devices: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda one, on: recorded.update({one.data_ptr(): on}))
    tensor = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_coo()

    def body() -> None:
        sparse.all_reduce(mpicoll.world()._core, tensor, ReduceOp.SUM)()

    mpicoll.run_local(body, 1)

    assert recorded == {one.data_ptr(): stream for one in (tensor._indices(), tensor._values())}
