"""The pipeline engine against the whole model in one process."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import mpirun
from support.ranks import Ranks, ranks, several, some, some_more
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.parallel import groups
from mpicoll.parallel.pipeline import schedules
from mpicoll.parallel.pipeline.engine import PipelineEngine
from mpicoll.parallel.pipeline.schedules import Action
from mpicoll.parallel.topology import PipelineParallelGrid, ProcessTopology

__all__ = ["ranks", "several", "some", "some_more"]  # fixtures

WIDTH = 5


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Plain(nn.Module):
    """From a tensor to one of another width, which depends on the number of the part."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH + number, WIDTH + number + 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Nested(nn.Module):
    """Passes on a dict: tensors of several dtypes and shapes, of which some need no gradient, and one is not used."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1 * number))

    def forward(self, x: Any) -> Any:
        came = x["x"] if isinstance(x, dict) else x
        scale = x["pair"][0] if isinstance(x, dict) else torch.ones(len(came))
        y = torch.sin(self.linear(came) * scale[:, None])
        counter = x["count"] + 1 if isinstance(x, dict) else torch.zeros(1, dtype=torch.int64)
        return {"x": y + self.shift, "pair": (y.sum(1), y.exp()), "count": counter, "none": None}


class PassesOn(nn.Module):
    """A view, and on odd parts the input itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = None if number % 2 else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.linear is None else self.linear(x).view(-1, WIDTH)


class Updates(nn.Module):
    """Passes on the dict that it takes, with another tensor in it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        found = x if isinstance(x, dict) else {"x": x, "pair": (x.sum(1),)}
        found["x"] = torch.tanh(self.linear(found["x"]))
        return found


class Apart(nn.Module):
    """Passes on a view of a weight, which it also applies to its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x["x"] + x["pair"][0][:, None] if isinstance(x, dict) else x
        bias = self.linear.bias.sum().expand(len(x))
        return {"x": torch.tanh(self.linear(x)), "pair": (bias,)}


class Frozen(nn.Module):
    """Without gradients in the first half of the model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(number > 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def loss_fn(output: Any, target: Tensor) -> Tensor:
    output = output["x"] + 0 * output["pair"][0][:, None] if isinstance(output, dict) else output
    return functional.mse_loss(output[:, :WIDTH], target)


_drawing = threading.Lock()


def parts(make: Callable[[int], nn.Module], count: int) -> list[nn.Module]:
    """The same on every rank, also where ranks are threads and share torch's generator."""
    made = []
    with _drawing, torch.random.fork_rng():
        for number in range(count):
            torch.manual_seed(number)
            made.append(make(number))
    return made


def data(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=random), torch.randn(count, WIDTH, generator=random)


def whole(model: Sequence[nn.Module], inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the model in one process, whose gradients are left in the parts."""
    value: Any = inputs
    for part in model:
        value = part(value)
    loss = loss_fn(value, targets)
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


def check_gradients(mine: Sequence[nn.Module], expected: Sequence[nn.Module], factor: float = 1.0) -> None:
    for part, oracle in zip(mine, expected, strict=True):
        for (name, one), other in zip(part.named_parameters(), oracle.parameters(), strict=True):
            if other.grad is None:
                assert one.grad is None, name
            else:
                assert one.grad is not None, name
                torch.testing.assert_close(one.grad, other.grad * factor, rtol=1e-12, atol=1e-13, msg=name)


KINDS = [Plain, Nested, PassesOn, Updates, Apart, Frozen]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 1), ("interleaved", 2), ("looped_bfs", 3)]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_equals_the_whole_model(ranks: Ranks, schedule: str, chunks: int, make: Callable[[int], nn.Module]) -> None:
    """With fewer micro-batches than stages, as many, and more, which don't divide the batch evenly."""

    def body() -> None:
        world = mpicoll.world()
        counts = [world.size, 2 * world.size] if schedule == "interleaved" else [1, world.size, world.size + 3]
        for count in counts:
            model = parts(make, world.size * chunks)
            mine = [model[chunk * world.size + world.rank] for chunk in range(chunks)]
            oracle = parts(make, world.size * chunks)
            inputs, targets = data(count + 2)
            engine = PipelineEngine(mine, loss_fn, micro_batches=count, schedule=schedule, group=world)
            loss = engine.train_batch(inputs, targets)
            assert loss.dtype is torch.float64
            torch.testing.assert_close(loss, whole(oracle, inputs, targets), rtol=1e-12, atol=0)
            check_gradients(mine, oracle[world.rank :: world.size])
            torch.testing.assert_close(engine.train_batch(inputs, targets), loss, rtol=0, atol=0)
            check_gradients(mine, oracle[world.rank :: world.size], 2.0)
            engine.free()

    ranks(body)


def test_only_the_ends_need_data(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        model = parts(Plain, world.size)
        inputs, targets = data(6)
        engine = PipelineEngine(model[world.rank], loss_fn, micro_batches=3, group=world)
        loss = engine.train_batch(
            inputs if engine.is_first_stage else None, targets if engine.is_last_stage else "what is not looked at"
        )
        torch.testing.assert_close(loss, whole(parts(Plain, world.size), inputs, targets))
        engine.free()

    several(body)


class Dropping(Plain):
    """Says in what mode it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.training else 0.5)


def test_evaluation(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        model, oracle = parts(Dropping, world.size), parts(Dropping, world.size)
        inputs, targets = data(7)
        engine = PipelineEngine(model[world.rank], loss_fn, micro_batches=3, group=world)
        value = inputs
        for part in oracle:
            value = part.eval()(value)
        torch.testing.assert_close(engine.eval_batch(inputs, targets), loss_fn(value, targets).detach())
        for count in (1, 3):
            found = engine.predict(inputs, micro_batches=count)
            torch.testing.assert_close(found, value.detach())
            assert not found.requires_grad
        assert model[world.rank].training
        assert all(one.grad is None for one in engine.parameters())
        engine.free()

    ranks(body)


def test_predict_joins_structures(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        model = parts(Nested, world.size)
        inputs, _ = data(4)
        value: Any = inputs
        for part in model:
            value = part(value)
        engine = PipelineEngine(model[world.rank], loss_fn, micro_batches=2, group=world)
        found = engine.predict(inputs, micro_batches=2)
        assert found["none"] is None
        torch.testing.assert_close(found["pair"][1], value["pair"][1])
        assert found["count"].tolist() == [world.size - 1] * 2
        engine.free()

    several(body)


class Ends(nn.Module):
    """Embeds on the first part, projects by the same weight on the last one."""

    def __init__(self, number: int, last: int) -> None:
        super().__init__()
        self.number, self.last = number, last
        if number in (0, last):
            torch.manual_seed(100 + number)  # different at first, so that it shows who is followed
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 0:
            x = x @ self.weight
        x = torch.tanh(self.linear(x))
        return x @ self.weight.t() if self.number == self.last else x


def test_tied_parameters(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        last = world.size - 1
        model, oracle = (parts(lambda number: Ends(number, last), world.size) for _ in range(2))
        oracle[last].weight = oracle[0].weight
        mine = model[world.rank]
        tied = {"weight": mine.weight} if hasattr(mine, "weight") else {}
        engine = PipelineEngine(mine, loss_fn, micro_batches=4, tied=tied, group=world)
        if tied:
            assert torch.equal(mine.weight, oracle[0].weight)
        inputs, targets = data(8)
        loss = engine.train_batch(inputs, targets)
        torch.testing.assert_close(loss, whole(oracle, inputs, targets))
        check_gradients([mine], [oracle[world.rank]])
        unique = dict.fromkeys(one for part in oracle for one in part.parameters())
        expected = torch.nn.utils.clip_grad_norm_(unique, 0.01)
        torch.testing.assert_close(engine.clip_grad_norm_(0.01), expected)
        check_gradients([mine], [oracle[world.rank]])
        engine.free()

    several(body)


def test_tied_parameters_without_gradients(several: Ranks) -> None:
    """Nobody trains them, so no optimizer may change them: neither frozen ones nor those that no part uses."""

    def body() -> None:
        world = mpicoll.world()
        part = Plain(world.rank)
        frozen, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
        frozen.requires_grad_(False)
        part.frozen, part.unused = frozen, unused
        tied = {"frozen": frozen, "unused": unused}
        engine = PipelineEngine(part, loss_fn, micro_batches=2, tied=tied, group=world)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1, weight_decay=0.5)
        engine.train_batch(*data(4))
        optimizer.step()
        assert frozen.grad is unused.grad is None
        assert frozen.tolist() == unused.tolist() == [1.0, 1.0]
        engine.free()

    several(body)


def test_tied_parameters_must_be_alike(some_more: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for kind, shape, dtype in (
            (mpicoll.ShapeError, (2, world.rank + 1), torch.float64),
            (mpicoll.DTypeError, (2, 1), torch.float32 if world.rank else torch.float64),
        ):
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            with pytest.raises(kind, match=r"tied parameter 'w' differs in .*0: .*1: "):
                PipelineEngine(Plain(0), loss_fn, micro_batches=1, tied={"w": parameter}, group=world)

    some_more(body)


def test_data_parallel() -> None:
    """Two pipelines of two stages; accumulated over two batches before the gradients are averaged."""

    def body() -> None:
        with PipelineParallelGrid(ProcessTopology(["pipe", "data"], [2, 2])) as grid, groups.use(grid):
            share = grid.get_data_parallel_rank()
            model, oracle = parts(Plain, 2), parts(Plain, 2)
            mine = model[grid.get_stage_id()]
            engine = PipelineEngine(mine, loss_fn, micro_batches=2)
            for seed in (0, 1):
                inputs, targets = data(8, seed)
                rows = slice(4 * share, 4 * share + 4)
                loss = engine.train_batch(inputs[rows], targets[rows], reduce=seed == 1)
                torch.testing.assert_close(loss, whole(oracle, inputs, targets))
            check_gradients([mine], [oracle[grid.get_stage_id()]])
            engine.free()

    mpicoll.run_local(body, 4)


def test_several_chunks_on_one_stage_need_no_message() -> None:
    def body() -> None:
        model, oracle = parts(Nested, 3), parts(Nested, 3)
        inputs, targets = data(4)
        engine = PipelineEngine(model, loss_fn, micro_batches=2, schedule="interleaved")
        torch.testing.assert_close(engine.train_batch(inputs, targets), whole(oracle, inputs, targets))
        check_gradients(model, oracle)
        torch.testing.assert_close(engine.predict(inputs)["x"], model[2](model[1](model[0](inputs)))["x"].detach())
        engine.free()

    mpicoll.run_local(body, 1)


def test_timeline(several: Ranks) -> None:
    """Every stage tells every stage what it did, in the order in which it did it."""

    def body() -> None:
        world = mpicoll.world()
        engine = PipelineEngine(parts(Plain, world.size)[world.rank], loss_fn, micro_batches=4, group=world)
        engine.train_batch(*data(4))
        timeline = engine.timeline()
        assert [tuple(span.action for span in spans) for spans in timeline.spans] == list(
            schedules.schedule("1f1b", world.size, 4)
        )
        assert 0 < timeline.bubble < 1
        engine.free()

    several(body)


class Broken(Plain):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("a part of the model fails")


def test_a_stage_that_fails_leaves_no_stage_waiting() -> None:
    def body() -> None:
        world = mpicoll.world()
        part = Broken(1) if world.rank == 1 else parts(Plain, 3)[world.rank]
        engine = PipelineEngine(part, loss_fn, micro_batches=4)
        with pytest.raises(ValueError, match="fails") if world.rank == 1 else pytest.raises(mpicoll.RankFailed):
            engine.train_batch(*data(4))
        if world.rank == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        mpicoll.run_local(body, 3, timeout=10)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((None, torch.zeros(4, WIDTH)), mpicoll.ArgumentError, "train_batch: this stage must pass inputs, got None"),
        ((torch.zeros(4, WIDTH), None), mpicoll.ArgumentError, "train_batch: this stage must pass targets, got None"),
        ((torch.zeros(3, WIDTH), torch.zeros(4, WIDTH)), mpicoll.ShapeError, r"inputs .* 4 micro-batches.*\(3, 5\)"),
        ((torch.zeros(4, WIDTH), torch.zeros(())), mpicoll.ShapeError, r"targets .* 4 micro-batches.*\(\)"),
        (([torch.zeros(4, 1), torch.zeros(5, 1)], torch.zeros(4, 1)), mpicoll.ShapeError, r"\(4, 1\), \(5, 1\)"),
        (((), torch.zeros(4, 1)), mpicoll.ShapeError, r"inputs .* got shapes \[\]"),
    ],
)
def test_wrong_batches(batch: tuple[Any, Any], error: type[Exception], message: str) -> None:
    def body() -> None:
        engine = PipelineEngine(Plain(0), loss_fn, micro_batches=4)
        with pytest.raises(error, match=message):
            engine.train_batch(*batch)

    mpicoll.run_local(body, 1)


def test_wrong_losses() -> None:
    def body() -> None:
        for loss, got in ((lambda output, target: output, r"shape \(1, 6\)"), (lambda output, target: 1.0, "float")):
            engine = PipelineEngine(Plain(0), loss, micro_batches=4)
            with pytest.raises(mpicoll.ShapeError, match=f"loss_fn must return the mean loss.*{got}"):
                engine.train_batch(*data(4))

    mpicoll.run_local(body, 1)


def test_wrong_schedules() -> None:
    def body() -> None:
        with pytest.raises(mpicoll.AlgorithmError, match=r"'forward_only' has no backward.* use one of gpipe, 1f1b"):
            PipelineEngine(Plain(0), loss_fn, micro_batches=4, schedule="forward_only")
        with pytest.raises(
            mpicoll.AlgorithmError, match="unknown pipeline schedule 'fast'; the registered schedules are gpipe"
        ):
            PipelineEngine(Plain(0), loss_fn, micro_batches=4, schedule="fast")
        with pytest.raises(mpicoll.AlgorithmError, match="1f1b has one chunk per stage, got chunks=2"):
            PipelineEngine([Plain(0), Plain(1)], loss_fn, micro_batches=4)
        for number in (2.0, "3"):
            with pytest.raises(mpicoll.AlgorithmError, match=f"1f1b: microbatches must be an integer, got {number!r}"):
                PipelineEngine(Plain(0), loss_fn, micro_batches=number)  # type: ignore[arg-type]

    mpicoll.run_local(body, 1)


def test_own_schedules(several: Ranks, own_schedules: None) -> None:
    """The engine does what verify lets pass: any order, whole and split backwards mixed, several chunks."""

    def body() -> None:
        world = mpicoll.world()
        for schedule, chunks in (("reversed", 1), ("one by one", 1), ("mixed", 1), ("depth first", 2)):
            model, oracle = parts(Plain, world.size * chunks), parts(Plain, world.size * chunks)
            mine = model[world.rank :: world.size]
            inputs, targets = data(9)
            engine = PipelineEngine(mine, loss_fn, micro_batches=4, schedule=schedule, group=world)
            torch.testing.assert_close(engine.train_batch(inputs, targets), whole(oracle, inputs, targets))
            check_gradients(mine, oracle[world.rank :: world.size])
            engine.free()

    several(body)


@pytest.fixture
def own_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_REGISTRY", schedules.schedules())

    @schedules.register(name="reversed")
    def backwards(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        yield from (Action("F", one) for one in reversed(range(microbatches)))
        yield from (Action("B", one) for one in range(microbatches))

    @schedules.register(name="one by one")
    def one_by_one(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        yield from (Action(kind, one) for one in range(microbatches) for kind in ("F", "B"))

    @schedules.register(name="mixed", splits=True)
    def mixed(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        yield from (Action("F", one) for one in range(microbatches))
        yield from (Action("I" if one % 2 else "B", one) for one in range(microbatches))
        yield from (Action("W", one) for one in range(1, microbatches, 2))

    @schedules.register(name="depth first", chunked=True)
    def depth_first(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
        yield from (Action("F", one, chunk) for one in range(microbatches) for chunk in range(chunks))
        yield from (
            Action("B", one, chunk) for one in reversed(range(microbatches)) for chunk in reversed(range(chunks))
        )


@pytest.mark.parametrize(
    ("first", "others", "has"),
    [
        ({"micro_batches": 2}, {}, ["2 micro-batches", "12 micro-batches"]),
        ({"schedule": "gpipe"}, {}, ["schedule 'gpipe'", "schedule '1f1b'"]),
        ({"schedule": "interleaved", "chunks": 2}, {"schedule": "interleaved"}, ["2 chunks", "1 chunks"]),
    ],
    ids=["micro_batches", "schedule", "chunks"],
)
def test_stages_must_agree(several: Ranks, first: dict[str, Any], others: dict[str, Any], has: list[str]) -> None:
    """All of them raise, and can make an engine afterwards."""

    def body() -> None:
        world = mpicoll.world()
        options = {"micro_batches": 12, "chunks": 1} | (others if world.rank else first)
        modules = [Plain(0)] * options.pop("chunks")
        with pytest.raises(mpicoll.ArgumentError, match="all stages must pass the same") as caught:
            PipelineEngine(modules, loss_fn, group=world, timeout=20, **options)
        other = 0 if world.rank else 1
        mine, theirs = has[world.rank > 0], has[other]
        assert re.search(f"stage {world.rank} has .*{mine}.*; stage {other} has .*{theirs}", str(caught.value))
        engine = PipelineEngine(parts(Plain, world.size)[world.rank], loss_fn, micro_batches=1, group=world)
        engine.train_batch(*data(1))
        engine.free()

    several(body)


@pytest.mark.mpi
def test_schedules_of_one_name_must_be_the_same(own_schedules: None) -> None:
    """Processes only: threads have one registry."""
    world = mpicoll.world()
    if world.size < 2:
        pytest.skip("needs two ranks")

    @schedules.register(name="differs")
    def differs(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        order = list(range(microbatches)) if world.rank else list(reversed(range(microbatches)))
        yield from (Action(kind, one) for kind in ("F", "B") for one in order)

    with pytest.raises(mpicoll.ArgumentError, match=r"but another schedule with the same name$"):
        PipelineEngine(Plain(0), loss_fn, micro_batches=2, schedule="differs", timeout=20)


def test_a_stage_that_cannot_be_made_is_named(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        options: dict[str, Any] = {"schedule": "fast"} if world.rank == 1 else {}
        kind = mpicoll.AlgorithmError if world.rank == 1 else mpicoll.ArgumentError
        told = "" if world.rank == 1 else "PipelineEngine: creating the engine failed on stage 1: AlgorithmError: "
        with pytest.raises(kind, match=f"^{told}unknown pipeline schedule 'fast'"):
            PipelineEngine(Plain(0), loss_fn, micro_batches=2, group=world, timeout=20, **options)

    several(body)


@pytest.mark.parametrize(("modules", "kind"), [("x", "str"), (3, "int"), ([Plain(0), None], "NoneType")])
def test_what_is_no_module_is_an_error_on_all_stages(several: Ranks, modules: Any, kind: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        given = modules if world.rank == 1 else Plain(0)
        with pytest.raises(
            mpicoll.ArgumentError, match=rf"modules must be .*, got a {kind} \(stage 1 of {world.size}\)"
        ):
            PipelineEngine(given, loss_fn, micro_batches=2, group=world, timeout=20)

    several(body)


@pytest.mark.parametrize("first", ["train", "evaluate", "predict 1", "predict 2"])
def test_other_methods_are_noticed(several: Ranks, first: str) -> None:
    """Nobody gets a result, and nobody goes on with what is left over."""
    others = {"train": "evaluate", "evaluate": "train", "predict 1": "predict 2", "predict 2": "predict 1"}[first]

    def body() -> None:
        world = mpicoll.world()
        part = nn.Linear(WIDTH, WIDTH)
        engine = PipelineEngine(part, functional.mse_loss, micro_batches=4, group=world, timeout=20)
        engine._p2p.timeout = 0.4
        inputs, targets = data(4)
        calls: dict[str, Callable[[], Any]] = {
            "train": lambda: engine.train_batch(inputs, targets),
            "evaluate": lambda: engine.eval_batch(inputs, targets),
            "predict 1": lambda: engine.predict(inputs, micro_batches=1),
            "predict 2": lambda: engine.predict(inputs, micro_batches=2),
        }
        with pytest.raises(mpicoll.CommunicationError) as caught:
            calls[others if world.rank else first]()
        if world.rank == 1:
            assert re.search(
                r"F0 needs .*: stage 1 runs \w+ of \d micro-batches, but stage 0 sent it a value of \w+ of \d",
                str(caught.value),
            )
        for call in calls.values():
            with pytest.raises(mpicoll.CommunicatorError, match="no longer synchronized; create a new one"):
                call()
        engine._p2p.timeout = 20
        mpicoll.barrier()
        engine.free()

    several(body)


class Once(Plain):
    """Fails in its second forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("a part of the model fails")
        return super().forward(x)


@pytest.mark.parametrize("failing", [0, 1])
def test_after_a_failure_no_batch_is_mixed_with_another(several: Ranks, failing: int) -> None:
    def body() -> None:
        world = mpicoll.world()
        number = world.rank
        part = Once(number) if number == failing else Plain(number)
        engine = PipelineEngine(part, loss_fn, micro_batches=4, group=world, timeout=20)
        engine._p2p.timeout = 0.4
        waits = r"train_batch of 4 micro-batches: [FB]\d needs .*: stage \d .* from"
        raises = (ValueError, "fails") if number == failing else (mpicoll.CommunicationError, waits)
        with pytest.raises(raises[0], match=raises[1]):
            engine.train_batch(*data(4))
        with pytest.raises(mpicoll.CommunicatorError, match="train_batch of 4 micro-batches ended in"):
            engine.train_batch(*data(4))
        engine._p2p.timeout = 20
        mpicoll.barrier()
        engine.free()
        engine.free()

    several(body)


def test_one_stage_alone_is_never_out_of_step() -> None:
    def body() -> None:
        part, oracle = Once(0), Plain(0)
        oracle.load_state_dict(part.state_dict())
        engine = PipelineEngine(part, loss_fn, micro_batches=2)
        with pytest.raises(ValueError, match="fails"):
            engine.train_batch(*data(4))
        part.zero_grad()
        torch.testing.assert_close(engine.train_batch(*data(4)), whole([oracle], *data(4)))
        check_gradients([part], [oracle])
        engine.free()

    mpicoll.run_local(body, 1)


def test_what_is_not_divided(ranks: Ranks) -> None:
    class Scaled(nn.Module):
        def forward(self, x: dict[str, Any]) -> Tensor:
            assert x["ids"] == [1, 2, 3]
            assert x["none"] is None
            return x["x"] * x["factor"]

    def body() -> None:
        world = mpicoll.world()
        mine = Scaled() if world.rank == 0 else nn.Identity()
        engine = PipelineEngine(mine, lambda y, t: loss_fn(y, t["t"]) * t["factor"], micro_batches=2, group=world)
        x, t = data(3)
        loss = engine.train_batch({"x": x, "factor": 2.0, "ids": [1, 2, 3], "none": None}, {"t": t, "factor": 3})
        torch.testing.assert_close(loss, loss_fn(x * 2, t) * 3)
        engine.free()

    ranks(body)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_inputs_may_require_gradients(several: Ranks, schedule: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        model, oracle = parts(Plain, world.size), parts(Plain, world.size)
        inputs, targets = data(5)
        mine, expected = (inputs.clone().requires_grad_() for _ in range(2))
        engine = PipelineEngine(model[world.rank], loss_fn, micro_batches=2, schedule=schedule, group=world)
        engine.train_batch(mine, targets)
        whole(oracle, expected, targets)
        if engine.is_first_stage:
            torch.testing.assert_close(mine.grad, expected.grad)
        check_gradients([model[world.rank]], [oracle[world.rank]])
        engine.free()

    several(body)


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_what_hides_tensors_is_refused() -> None:
    """Its tensors would arrive, but no gradient would come back."""

    class Hides(Plain):
        def forward(self, x: Tensor) -> Any:
            return [Opaque(super().forward(x))]

    def body() -> None:
        world = mpicoll.world()
        engine = PipelineEngine(Hides(0), loss_fn, micro_batches=2, timeout=2)
        kind = mpicoll.CommunicationError if world.rank else mpicoll.DTypeError
        with pytest.raises(kind, match="F0 needs" if world.rank else "part 0 of the model returned a Opaque, through"):
            engine.train_batch(*data(2))

    mpicoll.run_local(body, 2, timeout=10)


@pytest.mark.parametrize(
    ("compute", "error", "message"),
    [
        (lambda x: {"x": x.numpy()}, mpicoll.DTypeError, "predict: a ndarray in the output .*or pass micro_batches=1"),
        (lambda x: (x, Opaque(x)), mpicoll.DTypeError, r"predict: a Opaque .*\(stage 0 of 1\)"),
        (lambda x: (x, float(x.sum())), mpicoll.ArgumentError, r"must be the same .*got 0\.0, 1\.0; return tensors"),
        (lambda x: x if x.sum() else None, mpicoll.ArgumentError, r"got None, a tensor of shape \(1,\); return"),
        (lambda x: [x] * (1 + int(x.sum())), mpicoll.ArgumentError, r"got \[Tensor\], \[Tensor, Tensor\]; pass mic"),
    ],
)
def test_predict_loses_nothing(compute: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    class Computes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return compute(x)

    def body() -> None:
        engine = PipelineEngine(Computes(), loss_fn, micro_batches=2)
        with pytest.raises(error, match=message):
            engine.predict(torch.arange(2.0), micro_batches=2)
        engine.predict(torch.arange(2.0))

    mpicoll.run_local(body, 1)


def test_predict_needs_a_micro_batch(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        engine = PipelineEngine(parts(Plain, world.size)[world.rank], loss_fn, micro_batches=2, group=world)
        with pytest.raises(mpicoll.AlgorithmError, match="microbatches must be at least 1, got 0"):
            engine.predict(data(2)[0], micro_batches=0)
        engine.train_batch(*data(2))
        engine.free()

    some(body)


LEAVES = """
import sys
import torch, mpicoll
from mpicoll.parallel.pipeline import PipelineEngine

class Leaves(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            sys.exit(0)
        return super().forward(x)

rank = mpicoll.world().rank
part = (Leaves if rank == 1 else torch.nn.Linear)(3, 3)
engine = PipelineEngine(part, torch.nn.functional.mse_loss, micro_batches=6, timeout=1)
try:
    engine.train_batch(torch.ones(6, 3), torch.ones(6, 3))
except mpicoll.CommunicationError as error:
    print(f"rank {rank}: {error}", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_leaves_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES)
    done = mpirun(2, program, seconds=40, warm=True)
    assert "rank 0: train_batch of 6 micro-batches: B" in done.stdout
    # On time: what the stage waits for; on a loaded machine, first that the other has exited.
    waits = r"stage 0 \(global rank 0\): recv from stage 1|rank 0 waits in PipeP2P\.recv from stage 1 .* has exited"
    assert re.search(waits, done.stdout), done.stdout
    assert done.returncode != 124
