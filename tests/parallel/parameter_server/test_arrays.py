"""Parameter servers on numpy arrays."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.parameter_server_arrays import STEPS, make_gradients, make_model, raises, serve_or_work, train
from support.ranks import Ranks

import mpicoll
from mpicoll.errors import ArgumentError, MpicollError, ShapeError
from mpicoll.parallel.parameter_server import SGD, Adam, ParameterServer, Worker


def train_alone(make_optimizer: Callable[[Any], Any], workers: int, max_norm: float | None, decay: float) -> Any:
    """The weights after training with torch's optimizer in one process."""
    tensors = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in make_model().items()}
    optimizer = make_optimizer(tensors.values())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for step in range(STEPS):
        arrays = {name: one.detach().numpy() for name, one in tensors.items()}
        all_of_them = [make_gradients(arrays, worker, step) for worker in range(workers)]
        for name, one in tensors.items():
            one.grad = torch.from_numpy(np.asarray(sum(gradients[name] for gradients in all_of_them) / workers))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(tensors.values(), max_norm)
        optimizer.step()
        scheduler.step()
    return {name: one.detach().numpy() for name, one in tensors.items()}


RULES = {
    "SGD": (SGD, lambda params: torch.optim.SGD(params, 0.01)),
    "momentum": (
        lambda lr: SGD(lr, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda params: torch.optim.SGD(params, 0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    "Adam": (lambda lr: Adam(lr, weight_decay=0.1), lambda params: torch.optim.Adam(params, 0.01, weight_decay=0.1)),
    "AdamW": (
        lambda lr: Adam(lr, weight_decay=0.1, decoupled=True),
        lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("rule", "max_norm"), [("SGD", 0.5), ("momentum", None), ("Adam", 0.5), ("AdamW", None)])
def test_synchronous_training_equals_that_of_one_process(
    several: Ranks, servers: int, rule: str, max_norm: float | None
) -> None:
    if several.size <= servers:
        pytest.skip("needs a worker")
    make_rule, make_optimizer = RULES[rule]
    expected = train_alone(make_optimizer, several.size - servers, max_norm, 0.95)

    def body() -> Any:
        lr = lambda step: 0.01 * 0.95 ** (step - 1)  # noqa: E731
        return serve_or_work(servers, make_rule(lr), train, max_norm=max_norm, bucket_bytes=40)

    for model in several(body):
        if isinstance(model, dict):
            for name, array in model.items():
                np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12)
        else:
            assert model.updates == STEPS


def test_synchronous_training_has_the_same_bits_in_each_run() -> None:
    def run() -> bytes:
        found = mpicoll.run_local(lambda: serve_or_work(2, Adam(0.01), train, bucket_bytes=40), 5, timeout=20)
        return b"".join(array.tobytes() for array in found[-1].values())

    assert run() == run()


def test_the_servers_hold_the_weights_that_the_workers_get() -> None:
    def work(worker: Worker, number: int) -> Any:
        train(worker, number)
        return worker.get_weights()

    first, second, model, _ = mpicoll.run_local(serve_or_work, 4, 2, SGD(0.01), work, timeout=20)
    held = [one.get_weights() for one in (first, second)]
    assert sum(array.size for one in held for array in one.values()) == 29
    for name, array in model.items():
        parts = np.concatenate([one[name].reshape(-1) for one in held if name in one])
        assert sorted(parts) == sorted(array.reshape(-1))


def test_a_slow_worker_does_not_stop_the_asynchronous_mode() -> None:
    """It gets no further than its first push before the other one has ended."""
    ended = threading.Event()

    def work(worker: Worker, number: int) -> None:
        if number:
            train(worker, number)
            ended.set()
        else:
            assert ended.wait(20)
            worker.push_gradients(make_model())

    server, *_ = mpicoll.run_local(lambda: serve_or_work(1, SGD(0.01), work, mode="async"), 3, timeout=30)
    assert server.updates == STEPS + 1
    assert max(server.staleness_counts) == STEPS


def test_workers_take_turns_in_the_asynchronous_mode() -> None:
    """Where the pushes of all arrive faster than the server applies them."""
    clocks = [0] * 4

    def rule(*_: Any) -> None:
        time.sleep(0.004)

    def body() -> None:
        rank = mpicoll.world().rank
        if rank == 0:
            return ParameterServer(rule, mode="async").run()
        model = {"w": np.zeros(2)}
        with Worker(model) as worker:
            while max(clocks) < 16:
                worker.push_gradients({"w": np.ones(2)})
                worker.pull_weights()
                clocks[rank - 1] += 1
        return None

    mpicoll.run_local(body, 5, timeout=20)
    assert min(clocks) > 7


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_mean_is_finite_where_the_sum_exceeds_the_range_of_float16(dtype: str) -> None:
    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(SGD(1.0)).run()
        model = {"w": np.zeros(2, dtype), "rows": np.zeros((3, 2), dtype)}
        with Worker(model, sparse=["rows"]) as worker:
            worker.push_gradients({"w": np.full(2, 40000), "rows": ([1], np.full((1, 2), 40000))})
            worker.pull_weights()
        return {name: array.tolist() for name, array in model.items()}

    expected = {"w": [-40000] * 2, "rows": [[0, 0], [-40000] * 2, [0, 0]]}
    assert mpicoll.run_local(body, 3, timeout=20)[1:] == [expected] * 2


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bound_of_staleness_is_never_exceeded(staleness: int) -> None:
    pushes = [0, 0, 0]
    seen: list[int] = []

    def work(worker: Worker, number: int) -> None:
        for step in range(STEPS):
            pushes[number] += 1  # at least what the servers have applied
            worker.push_gradients(make_gradients(make_model(), number, step))
            if number == step % 3:
                time.sleep(0.003)
            if step + 1 < STEPS:  # a worker that has left counts no more
                worker.pull_weights()
                seen.append(pushes[number] - min(pushes))

    def body() -> Any:
        return serve_or_work(2, SGD(0.01), work, mode="ssp", staleness=staleness, bucket_bytes=40)

    found = mpicoll.run_local(body, 5, timeout=20)
    assert max(seen) <= staleness
    for server in found[:2]:
        assert server.staleness_counts.total() == 3 * STEPS


def test_sparse_gradients_update_their_rows_only() -> None:
    def body() -> Any:
        rank = mpicoll.world().rank
        if rank < 2:
            return ParameterServer(SGD(1.0, momentum=0.5), reduction="sum").run()
        model = {"table": np.zeros((7, 2)), "w": np.zeros(3)}
        with Worker(model, sparse=["table"]) as worker:
            for _ in range(2):
                rows = [rank, 6, rank]
                worker.push_gradients({"table": (rows, np.ones((3, 2)) * [[1], [10], [100]]), "w": np.ones(3)})
                model["table"][:] = -1
                worker.pull_weights(rows={"table": [0, 2, 6]})
                assert (model["table"][[1, 3, 4, 5]] == -1).all(), "only the rows that were asked for"
            return worker.get_weights()

    for weights in mpicoll.run_local(body, 4, timeout=20)[2:]:
        # With momentum the second update is 1.5 times the first one.
        np.testing.assert_array_equal(weights["table"][:, 0], [0, 0, -252.5, -252.5, 0, 0, -50])
        np.testing.assert_array_equal(weights["w"], [-5] * 3)


def test_a_pull_in_the_background_is_written_when_it_is_waited_for() -> None:
    def work(worker: Worker, number: int) -> None:
        model = worker._model.as_dict()
        worker.push_gradients(make_gradients(model, number, 0))
        before = model["w"].copy()
        pull = worker.pull_weights(wait=False)
        np.testing.assert_array_equal(model["w"], before)
        pull.wait()
        assert (model["w"] != before).all()

    mpicoll.run_local(serve_or_work, 3, 1, SGD(0.01), work, timeout=20)


def test_a_pull_has_the_weights_of_one_update() -> None:
    """A gradient that is sent while a pull is in progress, so that servers could update some of the weights first."""
    gradient = {"w": np.ones(64)}

    def body() -> list[list[float]]:
        if mpicoll.world().rank == 0:
            ParameterServer(SGD(1.0), bucket_bytes=64).run()
            return []
        model = {"w": np.zeros(64)}
        found = []
        with Worker(model) as worker:
            for _ in range(STEPS):
                worker.push_gradients(gradient)
                pull = worker.pull_weights(wait=False)
                worker.push_gradients(gradient)
                assert not pull.pending, "the weights have arrived before the servers got the gradient"
                pull.wait()
                found.append(sorted(set(model["w"].tolist())))
        return found

    expected = [[-1.0 - 2 * step] for step in range(STEPS)]
    assert mpicoll.run_local(body, 3, timeout=20)[1:] == [expected] * 2


def test_the_communicator_is_freed_at_the_end() -> None:
    def body() -> bool:
        if mpicoll.world().rank == 0:
            server = ParameterServer(SGD(1.0))
            server.run()
            return server._links._core.freed
        with Worker({"w": np.zeros(2)}) as worker:
            worker.push_gradients({"w": np.ones(2)})
        return worker._connection._links._core.freed

    assert mpicoll.run_local(body, 2, timeout=20) == [True, True]


def test_a_worker_that_leaves_counts_no_more() -> None:
    """Uneven data: the mean is that of the workers that push."""

    def body() -> Any:
        rank = mpicoll.world().rank
        if rank == 0:
            return ParameterServer(SGD(1.0)).run()
        model = {"w": np.zeros(2)}
        with Worker(model) as worker:
            for _ in range(rank):
                worker.push_gradients({"w": np.full(2, float(rank))})
                worker.pull_weights()
        return model["w"][0]

    assert mpicoll.run_local(body, 3, timeout=20) == [None, -1.5, -3.5]


# --- errors


def make(*models: Any, servers: list[dict[str, Any]]) -> None:
    rank = mpicoll.world().rank
    if rank < len(servers):
        ParameterServer(SGD(0.1), **servers[rank])
    else:
        Worker(models[rank - len(servers)])


ONE = {"w": np.zeros(3)}


@pytest.mark.parametrize(
    ("models", "servers", "text"),
    [
        ((ONE, {"w": np.zeros(4)}), [{}], "workers 1 and 2 have different models: 'w' float64[3] and 'w' float64[4]"),
        ((ONE, {**ONE, "b": np.zeros(1)}), [{}], "workers 1 and 2 have different models: 1 and 2 tensors"),
        ((ONE,), [{"mode": "sync"}, {"mode": "async"}], "servers 0 and 1 differ in mode 'sync' and 'async'"),
        ((ONE, ONE, ONE), [], "no rank is a server"),
        ((), [{}, {}], "no rank is a worker"),
        ((ONE, ONE), [{"mode": "bulk"}], "mode must be one of sync, async, ssp, got 'bulk'"),
        ((ONE, ONE), [{"max_norm": "1"}], "an argument is invalid: TypeError"),
        ((ONE, ONE), [{"mode": "ssp", "staleness": None}], "staleness must be an integer, got None"),
        ((ONE, ONE), [{"staleness": 2}], 'staleness= needs mode="ssp"'),
        (({"w": np.zeros(3, complex)}, ONE), [{}], "real floating-point numbers, got complex128"),
        (({"w": np.zeros(3, ">f8")}, ONE), [{}], "array 'w' must be contiguous, writable and in native byte order"),
        (({"w": np.zeros(3, int)}, ONE), [{}], "'w' must be a numpy array of real floating-point numbers, got int64"),
    ],
)
def test_arguments_that_do_not_fit_are_found_before_training(models: Any, servers: Any, text: str) -> None:
    body = raises(ArgumentError, text, lambda: make(*models, servers=servers))
    if "floating-point" in text:
        body = raises(MpicollError, text, lambda: make(*models, servers=servers))
    mpicoll.run_local(body, len(models) + len(servers), timeout=20)


def test_gradients_that_do_not_fit() -> None:
    def work(worker: Worker, number: int) -> None:
        with pytest.raises(ShapeError, match=r"the gradient of 'b' must have shape \(4,\), got \(3,\)"):
            worker.push_gradients({"b": np.ones(3)})
        with pytest.raises(ArgumentError, match="the model has no array 'v'"):
            worker.push_gradients({"v": np.ones(3)})
        with pytest.raises(ArgumentError, match="'w' is no sparse tensor"):
            worker.pull_weights(rows={"w": [1]})

    mpicoll.run_local(serve_or_work, 2, 1, SGD(0.01), work, timeout=20)


@pytest.mark.slow
def test_torch_is_not_needed() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import numpy as np, mpicoll\n"
        "from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker\n"
        "def body():\n"
        "    if mpicoll.world().rank == 0: return ParameterServer(SGD(1.0)).run()\n"
        "    model = {'w': np.zeros(2)}\n"
        "    with Worker(model) as worker:\n"
        "        worker.push_gradients({'w': np.ones(2)})\n"
        "        worker.pull_weights()\n"
        "    return model['w'].tolist()\n"
        "print(mpicoll.run_local(body, 2, timeout=20))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[None, [-1.0, -1.0]]\n", done.stderr
