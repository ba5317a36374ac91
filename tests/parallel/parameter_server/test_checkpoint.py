"""The state of servers, saved by some number of them and loaded by another one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.parameter_server_model import make_loss, make_module

import mpicoll
from mpicoll.errors import ArgumentError
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker
from mpicoll.parallel.parameter_server.checkpoint import _boxes

WORKERS = 2


def train(servers: int, steps: range, path: Path | None = None, save: Path | None = None) -> dict[str, torch.Tensor]:
    """The weights after `steps`, which `servers` have begun from the checkpoint in `path`."""

    def body() -> Any:
        rank = mpicoll.world().rank
        if rank < servers:
            with ParameterServer(
                optimizer=partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
                scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3),
                bucket_bytes=64,
            ) as server:
                if path is not None:
                    server.load(path)
                for _ in steps:
                    assert server.update_model()
                if save is not None:
                    server.save(save)
            return server.loaded_updates
        module = make_module()
        with Worker(module) as worker:
            worker.pull_weights()
            for step in steps:
                make_loss(module, rank - servers, step).backward()
                worker.push_gradients()
                worker.pull_weights()
        return module.state_dict()

    *_, state = found = mpicoll.run_local(body, servers + WORKERS, timeout=20)
    assert found[0] == (steps.start if path else 0)
    return state


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_training_continues_with_another_number_of_servers(tmp_path: Path, before: int, after: int) -> None:
    expected = train(1, range(10))
    saved = train(before, range(5), save=tmp_path / "half")
    continued = train(after, range(5, 10), tmp_path / "half")
    for name, value in expected.items():
        torch.testing.assert_close(continued[name], value, rtol=0, atol=1e-14)
    # Torch reads the weights, in the shapes of the model.
    state = {f"model.{name}": torch.zeros_like(value) for name, value in saved.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "half"), no_dist=True)
    for name, value in saved.items():
        torch.testing.assert_close(state[f"model.{name}"], value, rtol=0, atol=0)


def test_a_group_without_parameters_on_a_server(tmp_path: Path) -> None:
    """The bias is on the first of two servers."""

    def body(load: bool) -> Any:
        rank = mpicoll.world().rank
        if rank < 2:
            with ParameterServer(optimizer=make_groups) as server:
                if load:
                    server.load(tmp_path / "saved")
                else:
                    server.update_model()
                    server.save(tmp_path / "saved")
            return [group["lr"] for group in server._updater.optimizer.param_groups if group["params"]]
        module = torch.nn.Linear(8, 1)
        with Worker(module) as worker:
            if not load:
                module(torch.ones(1, 8)).sum().backward()
                worker.push_gradients()
            return worker.get_weights()["weight"]

    def make_groups(named: Any) -> torch.optim.Optimizer:
        groups = [{"params": [one for name, one in named if part in name]} for part in ("bias", "weight")]
        return torch.optim.SGD(groups, lr=0.5)

    saved, loaded = (mpicoll.run_local(body, 3, load, timeout=20) for load in (False, True))
    assert saved[:2] == loaded[:2] == [[0.5, 0.5], [0.5]]
    assert torch.equal(saved[2], loaded[2])


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    train(1, range(1), save=tmp_path / "some")

    def body(make: Any, module: Any) -> None:
        if mpicoll.world().rank:
            return Worker(module).close()
        server = make()
        with pytest.raises(ArgumentError, match="does not contain a checkpoint"):
            server.load(tmp_path)
        with pytest.raises(ArgumentError, match="already contains a checkpoint"):
            server.save(tmp_path / "some")
        with pytest.raises(ArgumentError, match=r"model\.0\.bias has shape \(7,\) in the checkpoint"):
            server.load(tmp_path / "some")
        return server.run()

    sgd = partial(torch.optim.SGD, lr=0.1)
    mpicoll.run_local(
        partial(body, partial(ParameterServer, optimizer=sgd), torch.nn.Sequential(torch.nn.Linear(1, 2))), 2
    )

    def numpy() -> None:
        if mpicoll.world().rank:
            return Worker({"w": torch.zeros(2).numpy()}).close()
        server = ParameterServer(SGD(0.1))
        with pytest.raises(ArgumentError, match="checkpoints need optimizer="):
            server.save(tmp_path / "other")
        return server.run()

    mpicoll.run_local(numpy, 2)


@pytest.mark.parametrize("shape", [(), (6,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_are_the_elements_of_a_range(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel()):
        for stop in range(start + 1, whole.numel() + 1):
            found = [
                whole[tuple(slice(at, at + extent) for at, extent in zip(offsets, sizes, strict=True))].reshape(-1)
                for offsets, sizes in _boxes(shape, start, stop)
            ]
            assert torch.cat(found).tolist() == list(range(start, stop))
