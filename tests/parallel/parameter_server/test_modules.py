"""Parameter servers of torch modules, with torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.parameter_server_model import make_loss, make_module
from support.ranks import Ranks
from torch import nn

import mpicoll
from mpicoll.errors import ArgumentError, CommunicationError
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker

STEPS = 20


def train_alone(make_optimizer: Callable[[Any], Any], workers: int, max_norm: float | None) -> dict[str, torch.Tensor]:
    module = make_module()
    optimizer = make_optimizer(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(make_loss(module, worker, step) for worker in range(workers)) / workers).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return module.state_dict()


def train(servers: int, optimizer: Any, passes: int = 1, prefetch: bool = False, **options: Any) -> Any:
    rank = mpicoll.world().rank
    if rank < servers:
        return ParameterServer(optimizer=optimizer, bucket_bytes=64, **options).run()
    module = make_module()
    if rank > servers:
        nn.init.zeros_(module[0].weight)  # only the first worker's values count
    with Worker(module, backward_passes=passes, prefetch=prefetch) as worker:
        worker.pull_weights()
        for step in range(STEPS):
            for _ in range(passes):
                (make_loss(module, rank - servers, step) / passes).backward()
            worker.push_gradients()
            worker.pull_weights()
    return module.state_dict()


@pytest.mark.parametrize(
    ("servers", "optimizer", "max_norm", "passes"),
    [
        (1, partial(torch.optim.SGD, lr=0.01), None, 1),
        (1, partial(torch.optim.Adam, lr=0.01), 0.5, 1),
        (2, partial(torch.optim.SGD, lr=0.01, momentum=0.9), 0.5, 2),
        (2, partial(torch.optim.AdamW, lr=0.01), None, 1),
    ],
)
def test_synchronous_training_equals_that_of_one_process(
    several: Ranks, servers: int, optimizer: Any, max_norm: float | None, passes: int
) -> None:
    if several.size <= servers:
        pytest.skip("needs a worker")
    expected = train_alone(optimizer, several.size - servers, max_norm)
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5)
    program = partial(train, servers, optimizer, passes, max_norm is None, scheduler=scheduler, max_norm=max_norm)
    for state in several(program):
        for name, value in (state or {}).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_gradients_are_sent_while_backward_runs() -> None:
    """The server has the last layer's gradient before the first layer's is computed."""

    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=0.1), bucket_bytes=64).run()
        module = make_module()
        sent: list[int] = []
        with Worker(module) as worker:
            module[1].register_full_backward_pre_hook(lambda *_: sent.append(len(worker._sent)))
            make_loss(module, 0, 0).backward()
            sent.append(len(worker._sent))
            worker.push_gradients()
        return sent, len(worker._keys)

    (before, after), total = mpicoll.run_local(body, 2, timeout=20)[1]
    assert 0 < before < after == total


def test_a_parameter_that_backward_does_not_reach_has_no_gradient() -> None:
    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0)).run()
        module = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with Worker(module) as worker:
            module["used"](torch.ones(1, 2)).sum().backward()
            worker.push_gradients()
            assert all(one.grad is None for one in module.parameters())
            worker.pull_weights()
        return [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]

    assert mpicoll.run_local(body, 2, timeout=20)[1] == ["used.weight", "used.bias"]


def test_a_second_backward_needs_a_push() -> None:
    def body() -> None:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0)).run()
        module = make_module()
        with Worker(module) as worker:
            make_loss(module, 0, 0).backward()
            with pytest.raises(ArgumentError, match="2 times since the last push_gradients"):
                make_loss(module, 0, 0).backward()
            worker.push_gradients()
        return None

    mpicoll.run_local(body, 2, timeout=20)


@pytest.mark.parametrize("servers", [1, 2])
def test_embeddings_send_rows(servers: int) -> None:
    """As torch's SparseAdam and SGD update them in one process, where tokens occur on several workers and twice."""
    tokens = [[0, 3, 3], [3, 6, 1]]

    initial = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 1)).double()

    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    def body() -> Any:
        rank = mpicoll.world().rank
        if rank < servers:
            return ParameterServer(optimizer=make_optimizer, max_norm=1.0).run()
        module = copy.deepcopy(initial)
        with Worker(module) as worker:
            for _ in range(5):
                module(torch.tensor(tokens[rank - servers])).square().sum().backward()
                worker.push_gradients()
                worker.pull_weights(rows={"0.weight": tokens[rank - servers]})
            worker.pull_weights()
        return module.state_dict()

    module = copy.deepcopy(initial)
    module[0].sparse = False
    optimizer = make_optimizer(module.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        (sum(module(torch.tensor(one)).square().sum() for one in tokens) / 2).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    for state in mpicoll.run_local(body, servers + 2, timeout=20)[servers:]:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("whole", [False, True])
def test_optimizers_whose_updates_depend_on_shapes(whole: bool) -> None:
    """Adafactor factors the second moments of a matrix, so it needs all of it on one server."""
    optimizer = partial(torch.optim.Adafactor, lr=0.1)

    def body() -> Any:
        if whole:
            return train(2, optimizer, whole_tensors=True)
        with pytest.raises((ArgumentError, CommunicationError), match="depend on the shapes of tensors"):
            train(2, optimizer)
        return None

    found = mpicoll.run_local(body, 4 if whole else 3, timeout=20)
    if whole:
        module = make_module()
        optimizer = optimizer(module.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            (sum(make_loss(module, worker, step) for worker in range(2)) / 2).backward()
            optimizer.step()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(found[-1][name], value, rtol=0, atol=1e-12)


def test_lbfgs_is_refused() -> None:
    def body() -> None:
        with pytest.raises((ArgumentError, CommunicationError), match="LBFGS calls the loss function"):
            train(1, torch.optim.LBFGS)

    mpicoll.run_local(body, 2, timeout=20)


def test_an_optimizer_has_all_parameters() -> None:
    def body() -> None:
        with pytest.raises((ArgumentError, CommunicationError), match=r"the optimizer does not have '.*weight"):
            train(1, lambda named: torch.optim.SGD([one for name, one in named if "bias" in name], lr=0.1))

    mpicoll.run_local(body, 2, timeout=20)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_norm_of_complex_gradients(mode: str) -> None:
    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0), mode=mode, max_norm=1.0).run()
        module = nn.ParameterDict({"real": torch.zeros(1), "complex": torch.zeros(1, dtype=torch.complex64)})
        with Worker(module) as worker:
            # The gradients are -3 and -4j, of norm 5.
            (-3 * module["real"] - 4 * module["complex"].imag).sum().backward()
            worker.push_gradients()
            worker.pull_weights()
        return [module["real"].item(), module["complex"].item()]

    assert mpicoll.run_local(body, 2, timeout=20)[1] == pytest.approx([0.6, 0.8j], abs=1e-6)


def test_bfloat16() -> None:
    """Gradients of dtypes that numpy does not have."""

    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0)).run()
        module = nn.Linear(2, 2, bias=False).bfloat16()
        nn.init.zeros_(module.weight)
        with Worker(module) as worker:
            (module(torch.ones(1, 2).bfloat16()) * mpicoll.world().rank).sum().backward()
            worker.push_gradients()
            worker.pull_weights()
        return module.weight.tolist()

    assert mpicoll.run_local(body, 3, timeout=20)[1:] == [[[-1.5, -1.5]] * 2] * 2


@pytest.mark.parametrize("prefetch", [None, False, True])
def test_weights_are_not_pulled_between_backward_and_push(prefetch: bool | None) -> None:
    """Some of them would be those after the update, and others those before it."""

    def body() -> None:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0)).run()
        module = make_module()
        with Worker(module, prefetch=prefetch) as worker:
            make_loss(module, 0, 0).backward()
            for operation in (worker.pull_weights, worker.get_weights):
                with pytest.raises(
                    ArgumentError, match=r"has sent gradients during backward.*call push_gradients first"
                ):
                    operation()
            worker.push_gradients()
            worker.pull_weights()
        return None

    mpicoll.run_local(body, 2, timeout=20)


def test_weights_are_asked_for_during_backward_where_pushes_are_followed_by_pulls() -> None:
    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=0.1)).run()
        module = make_module()
        found = []
        with Worker(module) as worker:
            for step in range(6):
                make_loss(module, 0, step).backward()
                found.append(worker._early is not None)
                worker.push_gradients()
                if step not in (2, 3):
                    worker.pull_weights()
                    latest = [one.clone() for one in module.parameters()]
                    assert all(map(torch.equal, latest, worker.get_weights().values()))
        return found

    assert mpicoll.run_local(body, 2, timeout=20)[1] == [False, True, True, False, False, True]


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_worker_does_not_close_between_backward_and_push(prefetch: bool) -> None:
    """The server may have applied some of its gradients."""

    def body() -> None:
        if mpicoll.world().rank == 0:
            with pytest.raises(CommunicationError, match="worker rank 1 has left because of an error"):
                ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0)).run()
            return
        module = make_module()
        worker = Worker(module, prefetch=prefetch, timeout=5)
        make_loss(module, 0, 0).backward()
        if prefetch:
            with pytest.raises(ArgumentError, match="call push_gradients first"):
                worker.get_weights()
        with pytest.raises(ArgumentError, match="call push_gradients after each backward"):
            worker.close()

    mpicoll.run_local(body, 2, timeout=20)


def test_sparse_gradients_need_to_be_named() -> None:
    def body() -> None:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=1.0)).run()
        module = nn.Linear(2, 3, bias=False)
        with Worker(module) as worker:
            with pytest.raises(ArgumentError, match="the gradient of 'weight' is sparse; name it in sparse="):
                nn.functional.embedding(torch.tensor([0]), module.weight, sparse=True).sum().backward()
            worker._model.clear_gradients()
        return None

    mpicoll.run_local(body, 2, timeout=20)


def test_rules_do_not_update_bfloat16() -> None:
    def make() -> None:
        if mpicoll.world().rank == 0:
            ParameterServer(SGD(0.1))
        else:
            Worker(nn.Linear(2, 2, bias=False).bfloat16())

    def body() -> None:
        with pytest.raises(ArgumentError, match=r"can't update 'weight' bfloat16\[2, 2\]; pass optimizer="):
            make()

    mpicoll.run_local(body, 2, timeout=20)


def test_an_update_of_a_bucket_looks_at_its_parameters_only() -> None:
    """There is one parameter at least for each bucket: else updates would take the square of the size of the model."""
    seen: list[int] = []

    def count(optimizer: Any) -> int:
        return sum(len(group["params"]) for group in optimizer.param_groups)

    def make_optimizer(named: Any) -> Any:
        optimizer = torch.optim.SGD(named, lr=1.0)
        optimizer.register_step_pre_hook(lambda one, *_: seen.append(count(one)))
        return optimizer

    def program() -> int:
        if mpicoll.world().rank == 0:
            server = ParameterServer(optimizer=make_optimizer, bucket_bytes=64)
            server.run()
            return count(server._updater.optimizer)
        with Worker(nn.Linear(8, 8)) as worker:
            worker.push_gradients()
            worker.pull_weights()
        return 0

    assert mpicoll.run_local(program, 2)[0] >= 5
    assert len(seen) >= 5
    assert max(seen) <= 2
