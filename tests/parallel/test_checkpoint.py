"""Save in one layout, load in another: every bit is the same, and training goes on as it would have.

Layouts are those of a model in name only: parameters with a gradient that is drawn by name and step, of which each rank
takes its part. So one process can say what every bit must be.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.launch import ROOT, mpirun
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.errors import ArgumentError, CommunicatorError, ShapeError
from mpicoll.parallel.checkpoint import load, model_state, optimizer_state, save
from mpicoll.parallel.layers import shard_
from mpicoll.parallel.shards import get_shard, mark
from mpicoll.parallel.topology import PipelineParallelGrid, initialize_model_parallel

LAYERS = 4
SHAPES = {"up.weight": ((24, 12), 0), "up.bias": ((24,), 0), "down.weight": ((12, 24), 1), "norm.weight": ((12,), None)}
Optimize = Callable[[Any], torch.optim.Optimizer]


def draw(name: str, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Part:
    """What a rank holds in a layout: its stage's layers, and of these its shards.

    The first stage has an embedding, the last one a head that is tied to it. Layers are numbered from 0 in each stage.
    """

    def __init__(
        self, optimize: Optimize, grid: PipelineParallelGrid | None = None, dtype: Any = torch.float32
    ) -> None:
        self.comm = None if grid is None else grid.communicator("model")
        stage = 0 if grid is None else grid.get_stage_id()
        stages = 1 if grid is None else grid.get_pipe_parallel_world_size()
        mine = np.array_split(np.arange(LAYERS), stages)[stage].tolist()
        self.first = mine[0]
        self.module = nn.Module()
        self.dtype = dtype
        if stage == 0:
            self.add("embedding.weight", (48, 12), 0)
        for number in range(len(mine)):
            for name, (shape, dim) in SHAPES.items():
                self.add(f"layers.{number}.{name}", shape, dim)
        if stages == 1:
            self.module.head = self.module.embedding
        elif stage == stages - 1:
            self.add("head.weight", (48, 12), 0)
        self.module.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.optimizer = optimize(self.module.parameters())

    def add(self, name: str, shape: tuple[int, ...], dim: int | None) -> None:
        *path, last = name.split(".")
        at = self.module
        for one in path:
            if not hasattr(at, one):
                at.add_module(one, nn.Module())
            at = getattr(at, one)
        part = list(shape)
        if dim is not None and self.comm is not None:
            part[dim] //= self.comm.size
        param = nn.Parameter(torch.full(part, torch.nan, dtype=self.dtype))
        if dim is not None and self.comm is not None:
            mark(param, dim, None, self.comm)
        at.register_parameter(last, param)

    def names(self, name: str) -> str:
        """The name in the whole model."""
        if name == "head.weight":
            return "embedding.weight"
        what, _, rest = name.partition(".")
        if what != "layers":
            return name
        number, _, rest = rest.partition(".")
        return f"layers.{int(number) + self.first}.{rest}"

    def own(self, param: Tensor, whole: Tensor) -> Tensor:
        shard = get_shard(param)
        if shard is None:
            return whole
        extent = param.shape[shard.dim]
        return whole.narrow(shard.dim, extent * shard.comm.rank, extent).clone()

    def params(self) -> Iterator[tuple[str, nn.Parameter, Callable[[int], Tensor]]]:
        """Global names, parameters, and what is drawn for them at each step."""
        for name, param in self.module.named_parameters():
            whole = list(param.shape)
            shard = get_shard(param)
            if shard is not None:
                whole[shard.dim] *= shard.comm.size
            name = self.names(name)

            def drawn(step: int, name: str = name, param: Tensor = param, whole: Any = tuple(whole)) -> Tensor:
                return self.own(param, draw(name, step, whole, self.dtype))

            yield name, param, drawn

    def start(self) -> Part:
        for _, param, drawn in self.params():
            param.data.copy_(drawn(0))
        return self

    def train(self, *steps: int) -> Part:
        for step in steps:
            for _, param, drawn in self.params():
                param.grad = drawn(step)
            self.optimizer.step()
            self.module.seen += step
        return self

    def check(self, steps: int, optimize: Optimize) -> None:
        """This is where one process would be after so many steps."""
        whole = Part(optimize, dtype=self.dtype).start().train(*range(1, steps + 1))
        theirs = dict(whole.module.named_parameters())
        for name, param, _ in self.params():
            assert torch.equal(param, self.own(param, theirs[name])), name
            mine, wanted = self.optimizer.state.get(param, {}), whole.optimizer.state.get(theirs[name], {})
            assert mine.keys() == wanted.keys()
            for entry, value in wanted.items():
                if isinstance(value, Tensor):
                    assert mine[entry].dtype == value.dtype
                    assert torch.equal(mine[entry], self.own(param, value) if value.dim() else value), (name, entry)
                else:
                    assert mine[entry] == value
        assert torch.equal(self.module.seen, whole.module.seen)
        plain = [{key: value for key, value in one.param_groups[0].items() if key != "params"} for one in
                 (self.optimizer, whole.optimizer)]  # fmt: skip
        assert plain[0] == plain[1]


OPTIMIZERS: dict[str, Optimize] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, betas=(0.8, 0.9)),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
}
adamw = OPTIMIZERS["adamw"]


# --- one process


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    optimize = OPTIMIZERS[kind]
    part = Part(optimize, dtype=dtype).start().train(1, 2)
    before = {name: param.data_ptr() for name, param in part.module.named_parameters()}
    assert save(tmp_path / "a", part.module, part.optimizer, {"step": 2, "x": torch.ones(2)}) is None
    part.check(2, optimize)
    assert before == {name: param.data_ptr() for name, param in part.module.named_parameters()}
    other = Part(optimize, dtype=dtype)
    extra = load(tmp_path / "a", other.module, other.optimizer)
    assert extra.keys() == {"step", "x"}
    assert extra["step"] == 2
    assert torch.equal(extra["x"], torch.ones(2))
    other.check(2, optimize)
    other.train(3, 4).check(4, optimize)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_into_another_dtype(tmp_path: Path, kind: str) -> None:
    """The optimizer's state follows the parameters, or it could make no step."""
    part = Part(OPTIMIZERS[kind], dtype=torch.float32).start().train(1, 2)
    save(tmp_path / "a", part.module, part.optimizer)
    other = Part(OPTIMIZERS[kind], dtype=torch.float64)
    load(tmp_path / "a", other.module, other.optimizer)
    for (name, param), expected in zip(other.module.named_parameters(), part.module.parameters(), strict=True):
        assert torch.equal(param, expected.double()), name
        for entry, value in part.optimizer.state[expected].items():
            found = other.optimizer.state[param][entry]
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim():
                assert found.dtype is torch.float64
            if isinstance(value, Tensor):
                assert torch.equal(found.double(), value.double()), (name, entry)
    other.train(3)


def test_a_checkpoint_that_is_there_is_replaced(tmp_path: Path) -> None:
    part = Part(adamw).start()
    save(tmp_path / "a", part.module, part.optimizer, "old", overwrite=True)
    part.train(1)
    (tmp_path / "a.new").mkdir()
    (tmp_path / "a.new" / "__0_0.distcp").write_text("what an attempt that was broken off has left")
    save(tmp_path / "a", part.module, part.optimizer, "new", overwrite=True)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    other = Part(adamw)
    assert load(tmp_path / "a", other.module, other.optimizer) == "new"
    other.check(1, adamw)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "first rename", "second rename", "removing"])
def test_a_save_that_is_cut_off_leaves_a_checkpoint(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of before or the new one, in its place or where the error says."""

    class Killed(BaseException):
        pass

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    part = Part(adamw).start()
    save(tmp_path / "a", part.module, part.optimizer, "old")
    part.train(1)
    with monkeypatch.context() as patch:
        if moment == "writing":
            patch.setattr(dcp.FileSystemWriter, "finish", fail)
        elif moment == "removing":
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or fail())
        else:
            rename, last = Path.rename, "a" if moment == "first rename" else "a.new"
            patch.setattr(Path, "rename", lambda path, to: fail() if path.name == last else rename(path, to))
        with pytest.raises(OSError if moment == "writing" else Killed):  # DCP makes its own of it
            save(tmp_path / "a", part.module, part.optimizer, "new", overwrite=True)
    other = Part(adamw)
    if moment == "second rename":
        with pytest.raises(
            ArgumentError, match=r"does not contain a checkpoint.*left a checkpoint in \S+a.new and in \S+a.old"
        ):
            load(tmp_path / "a", other.module, other.optimizer)
        assert load(tmp_path / "a.new", other.module, other.optimizer) == "new"
        assert load(tmp_path / "a.old", other.module, other.optimizer) == "old"
    found = load(tmp_path / ("a.old" if moment == "second rename" else "a"), other.module, other.optimizer)
    assert found == ("new" if moment == "removing" else "old")
    other.check(1 if found == "new" else 0, adamw)
    save(tmp_path / "a", part.module, part.optimizer, "newest", overwrite=True)
    assert load(tmp_path / "a", other.module, other.optimizer) == "newest"


def test_states_that_can_not_be_saved(tmp_path: Path) -> None:
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(linear.parameters())

    def closure() -> Tensor:
        loss = linear(torch.ones(2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ArgumentError, match=r"LBFGS keeps 'al', a list, for 'weight'; only"):
        save(tmp_path / "a", linear, optimizer)


def test_the_model_alone(tmp_path: Path) -> None:
    part = Part(adamw).start().train(1)
    save(tmp_path / "a", part.module)
    other = Part(adamw)
    assert load(tmp_path / "a", other.module) is None
    for (name, mine), (_, theirs) in zip(
        part.module.state_dict().items(), other.module.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert not other.optimizer.state
    with pytest.raises(
        ArgumentError, match=r"does not contain optimizer.param_groups.embedding.weight.\w+, .* and \d+ more; it was"
    ):
        load(tmp_path / "a", other.module, other.optimizer)


def test_an_optimizer_that_has_made_no_step(tmp_path: Path) -> None:
    part = Part(adamw).start()
    save(tmp_path / "a", part.module, part.optimizer)
    assert not part.optimizer.state
    part.check(0, adamw)
    other = Part(adamw).start().train(1, 2, 3)
    load(tmp_path / "a", other.module, other.optimizer)
    other.check(0, adamw)
    other.train(1, 2).check(2, adamw)


def test_options_are_loaded(tmp_path: Path) -> None:
    def optimize(params: Any, lr: float = 1.0) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.AdamW(
            [{"params": params[:3], "lr": lr / 2}, {"params": params[3:]}], lr=lr, betas=(0.5, 0.6)
        )

    part = Part(optimize).start()
    first = torch.optim.lr_scheduler.ExponentialLR(part.optimizer, 0.5)
    part.train(1)
    first.step()
    save(tmp_path / "a", part.module, part.optimizer)
    other = Part(lambda params: optimize(params, 7.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.5)
    assert [group["lr"] for group in other.optimizer.param_groups] == [3.5, 7.0]
    load(tmp_path / "a", other.module, other.optimizer)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.25, 0.5]
    assert [group["initial_lr"] for group in other.optimizer.param_groups] == [0.5, 1.0]
    assert {group["betas"] for group in other.optimizer.param_groups} == {(0.5, 0.6)}
    other.train(2)
    scheduler.step()
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.125, 0.25]
    joined = Part(lambda params: torch.optim.AdamW(params, lr=1.0))
    joined.optimizer.param_groups[0]["initial_lr"] = 1.0
    with pytest.raises(ArgumentError, match=r"lr=0.5 for 'layers.0.\w+.\w+' and 0.25 for other parameters of group 0"):
        load(tmp_path / "a", joined.module, joined.optimizer)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    def optimize(lr: float) -> Optimize:
        return lambda params: torch.optim.AdamW(params, lr=torch.tensor(lr), foreach=False)

    part = Part(optimize(0.5)).start().train(1)
    save(tmp_path / "a", part.module, part.optimizer)
    other = Part(optimize(0.25))
    load(tmp_path / "a", other.module, other.optimizer)
    assert other.optimizer.param_groups[0]["lr"].item() == 0.5
    other.train(2).check(2, optimize(0.5))


class Counter(nn.Linear):
    """Has a state that is no tensor."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "text": ("a", [self.count])}

    def set_extra_state(self, state: Any) -> None:
        assert state["text"] == ("a", [state["count"]])
        self.count = state["count"]


def test_extra_states_of_modules(tmp_path: Path) -> None:
    module, other = (nn.Sequential(Counter(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    module[0].count = 5
    module(torch.randn(4, 2))
    save(tmp_path / "a", module)
    load(tmp_path / "a", other)
    assert other[0].count == 5
    assert torch.equal(other[1].running_mean, module[1].running_mean)
    assert other[1].num_batches_tracked.item() == 1


class Stateful(nn.Module):
    """Has any state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (torch.tensor([7]), torch.tensor([0])),
        (torch.arange(3, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
        ({"amax": torch.ones(2)}, {}),
        ({"amax": [1, torch.ones(2)]}, None),
        ({"a": {3: (torch.ones(2), 4)}}, {"a": {}}),
        (None, {"a": 1}),
        (b"bytes", b""),
    ],
)
def test_extra_states_of_any_kind(tmp_path: Path, saved: Any, fresh: Any) -> None:
    shared = Stateful(saved)
    save(tmp_path / "a", nn.ModuleDict({"one": shared, "same": shared}), names=lambda name: f"whole.{name}")
    other = nn.ModuleDict({"one": Stateful(fresh), "same": Stateful(None)})
    other["same"].weight = other["one"].weight
    kept = copy.deepcopy(fresh)
    load(tmp_path / "a", other, names=lambda name: f"whole.{name}")
    for module in other.values():
        torch.testing.assert_close(module.state, saved, rtol=0, atol=0)
    torch.testing.assert_close(fresh, kept, rtol=0, atol=0)
    torch.testing.assert_close(model_state(shared)["_extra_state"], saved, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (7, 0),
        (b"bytes", b""),
        ([1, 2], [0]),
        ({"scale": 7, "amax": torch.ones(2)}, {"scale": 0, "amax": torch.zeros(2)}),
        (torch.tensor([7]), torch.tensor([0])),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_extra_states_as_torch_saves_them(tmp_path: Path, saved: Any, fresh: Any) -> None:
    """Older versions have saved them so, too."""
    dcp.save({"model": Stateful(saved).state_dict()}, checkpoint_id=tmp_path / "a")
    other = Stateful(fresh)
    load(tmp_path / "a", other)
    torch.testing.assert_close(other.state, saved, rtol=0, atol=0)


def test_optimizers_that_know_names(tmp_path: Path) -> None:
    """They are those of a layout, such as of a stage."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one = torch.optim.AdamW([("0.weight", first.weight), ("0.bias", first.bias)], lr=0.5)
    save(tmp_path / "named", first, one)
    save(tmp_path / "plain", first, torch.optim.AdamW(first.parameters(), lr=0.25))
    other = torch.optim.AdamW([("7.weight", second.weight), ("7.bias", second.bias)], lr=0.1)
    for kind, lr in (("named", 0.5), ("plain", 0.25)):
        load(tmp_path / kind, second, other)
        assert other.param_groups[0]["lr"] == lr
        assert other.param_groups[0]["param_names"] == ["7.weight", "7.bias"]


def test_torch_reads_it_and_its_own_is_read(tmp_path: Path) -> None:
    part = Part(adamw).start().train(1, 2)
    del part.module.head
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def theirs(part: Part) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(part.module, part.optimizer, options=options)
        return {"model": get_model_state_dict(part.module), "optimizer": optimizer}

    save(tmp_path / "ours", part.module, part.optimizer)
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save(theirs(part), checkpoint_id=tmp_path / "theirs")
    reads = [dcp.FileSystemReader(tmp_path / one).read_metadata().state_dict_metadata for one in ("ours", "theirs")]
    assert reads[0].keys() - {"extra"} == reads[1].keys()
    other = Part(adamw)
    del other.module.head
    assert load(tmp_path / "theirs", other.module, other.optimizer) is None
    other.check(2, adamw)
    third = Part(adamw).start().train(1)
    del third.module.head
    state = theirs(third)
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=tmp_path / "ours")
    assert torch.equal(state["optimizer"]["state.layers.0.up.weight.exp_avg"],
                       part.optimizer.state[part.module.layers.get_submodule("0.up").weight]["exp_avg"])  # fmt: skip


def test_wrong_checkpoints(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    adam = torch.optim.Adam(model.parameters())
    save(tmp_path / "a", model, adam)
    with pytest.raises(ArgumentError, match=r"save: .*a already contains a checkpoint; .* overwrite=True$"):
        save(tmp_path / "a", model)
    with pytest.raises(ArgumentError, match=r"load: .*none does not contain a checkpoint \("):
        load(tmp_path / "none", model)
    kept = model[0].weight.clone()
    with pytest.raises(ArgumentError, match=r"load: the checkpoint does not contain model.2.weight, model.2.bias$"):
        load(tmp_path / "a", nn.Sequential(*model, nn.Linear(2, 2)))
    with pytest.raises(
        ShapeError, match=r"has model.1.weight of shape \(2, 3\), but .* \(4, 3\), model.1.bias of shape"
    ):
        load(tmp_path / "a", nn.Sequential(model[0], nn.Linear(3, 4)))
    sgd = torch.optim.SGD(model.parameters(), momentum=0.5)
    with pytest.raises(
        ArgumentError,
        match=r"does not contain optimizer.param_groups.0.weight.*than SGD",
    ):
        load(tmp_path / "a", model, sgd)
    assert torch.equal(model[0].weight, kept)
    for operation in (save, load):
        with pytest.raises(ArgumentError, match=r"'0.bias' and '0.weight' have the same name 'x' in the full model"):
            operation(tmp_path / ("a" if operation is load else "b"), model, names=lambda _: "x")
        with pytest.raises(
            ArgumentError, match=r"parameter group 0 of the Adam has a parameter of shape \(3, 2\) that does not belong"
        ):
            operation(tmp_path / ("a" if operation is load else "b"), nn.Sequential(nn.Linear(2, 3), model[1]), adam)
    assert not (tmp_path / "b").exists()
    (tmp_path / "c").write_text("")
    with pytest.raises(OSError, match=r"save: .*c: FileExistsError on rank 0"):
        save(tmp_path / "c", model)


# --- layouts


def layouts(size: int) -> list[tuple[int, int]]:
    """Numbers of shards and stages; the rest is copies."""
    return [(tp, pp) for tp in range(1, size + 1) for pp in range(1, size + 1) if size % (tp * pp) == 0]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for all ranks. (pytest's own is one for each, and its cleaning up is not made for several processes.)"""
    first = dist.get_rank() == 0
    paths = [tempfile.mkdtemp(prefix="checkpoint-") if first else ""]
    dist.broadcast_object_list(paths)
    yield Path(paths[0])
    dist.barrier()
    if first:
        shutil.rmtree(paths[0])


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
class TestRanks:
    def test_from_one_layout_to_another(self, folder: Path) -> None:
        everywhere = layouts(dist.get_world_size())
        for tp, pp in everywhere:
            with initialize_model_parallel(tp, pp) as grid:
                part = Part(adamw, grid).start().train(1, 2)
                save(folder / f"{tp}x{pp}", part.module, part.optimizer, {"from": (tp, pp)}, part.names)
                part.check(2, adamw)
        for number, (tp, pp) in enumerate(everywhere):
            with initialize_model_parallel(tp, pp) as grid:
                for other in {everywhere[(number + step) % len(everywhere)] for step in (1, 2)}:
                    part = Part(adamw, grid)
                    extra = load(folder / "{}x{}".format(*other), part.module, part.optimizer, part.names)
                    assert extra == {"from": other}
                    part.check(2, adamw)
                    part.train(3).check(3, adamw)

    @pytest.mark.parametrize("kind", ["momentum", "sgd"])
    def test_other_optimizers(self, folder: Path, kind: str) -> None:
        optimize = OPTIMIZERS[kind]
        size = dist.get_world_size()
        with initialize_model_parallel(size) as grid:
            part = Part(optimize, grid).start().train(1)
            save(folder / "a", part.module, part.optimizer, names=part.names)
        with initialize_model_parallel(1, size) as grid:
            part = Part(optimize, grid, torch.float64)  # converts the parameters
            load(folder / "a", part.module, names=part.names)
            part = Part(optimize, grid)
            load(folder / "a", part.module, part.optimizer, names=part.names)
            part.train(2).check(2, optimize)

    def test_ranks_replace_a_checkpoint(self, folder: Path) -> None:
        with initialize_model_parallel(dist.get_world_size()) as grid:
            part = Part(adamw, grid).start()
            save(folder / "a", part.module, part.optimizer, "old", part.names)
            part.train(1)
            with pytest.raises(ArgumentError, match=r"pass overwrite=True"):
                save(folder / "a", part.module, part.optimizer, "new", part.names)
            save(folder / "a", part.module, part.optimizer, "new", part.names, overwrite=True)
            assert [one.name for one in folder.iterdir()] == ["a"]
            other = Part(adamw, grid)
            assert load(folder / "a", other.module, other.optimizer, part.names) == "new"
            other.check(1, adamw)

    def test_each_rank_loads_the_whole(self, folder: Path) -> None:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        with initialize_model_parallel(dist.get_world_size()) as grid:
            part = Part(adamw, grid).start().train(1)
            save(folder / "a", part.module, part.optimizer, names=part.names)
        whole = Part(adamw)
        load(folder / "a", whole.module, whole.optimizer, group=alone)
        whole.train(2).check(2, adamw)
        dist.destroy_process_group(alone)

    def test_what_is_written_is_written_once(self, folder: Path) -> None:
        with initialize_model_parallel() as grid:  # copies only
            part = Part(adamw, grid).start().train(1)
            save(folder / "a", part.module, part.optimizer, names=part.names)
        dist.barrier()
        metadata = dcp.FileSystemReader(folder / "a").read_metadata()
        assert all(len(one.chunks) == 1 for one in metadata.state_dict_metadata.values() if hasattr(one, "chunks"))
        assert not any("head" in key for key in metadata.state_dict_metadata)

    def test_states_are_dtensors_in_the_parameters_memory(self) -> None:
        size = dist.get_world_size()
        with initialize_model_parallel(size) as grid:
            part = Part(adamw, grid).start().train(1)
            model = model_state(part.module, part.names)
            states = optimizer_state(part.module, part.optimizer, part.names)
            for name, param, _ in part.params():
                for value, own in (
                    (model[name], param),
                    (states[f"state.{name}.exp_avg"], part.optimizer.state[param]["exp_avg"]),
                ):
                    cut = get_shard(param) is not None and size > 1
                    assert isinstance(value, DTensor) == cut
                    local = value.to_local() if isinstance(value, DTensor) else value
                    assert local.data_ptr() == own.data_ptr()
                    assert not value.requires_grad
                whole = model[name].full_tensor() if cut else model[name]
                theirs = dict(Part(adamw).start().train(1).module.named_parameters())[name]
                assert torch.equal(whole, theirs)
                if cut:
                    assert model[name].device_mesh.get_group() is grid.get_slice_parallel_group()

    def test_layers_of_this_package_under_ddp(self, folder: Path) -> None:
        size = dist.get_world_size()
        tp = 2 if size % 2 == 0 else 1

        def make() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()

        plan = {"0": "vocab", "1": {"layer": "column", "gather_output": False}, "3": "row"}
        ids = torch.arange(8)
        with initialize_model_parallel(tp) as grid:
            model = DistributedDataParallel(
                shard_(make(), plan), process_group=grid.get_data_parallel_group(), find_unused_parameters=False
            )
            adam = torch.optim.Adam(model.parameters(), lr=0.1)

            def step(model: nn.Module, adam: torch.optim.Optimizer) -> float:
                adam.zero_grad()
                loss = model(ids).square().mean()
                loss.backward()
                adam.step()
                return float(loss.detach())

            step(model, adam)
            save(folder / "a", model, adam)
            wanted = [step(model, adam) for _ in range(3)]
            del model
            plain = make()
            theirs = torch.optim.Adam(plain.parameters(), lr=0.1)
            load(folder / "a", plain, theirs)
            assert [step(plain, theirs) for _ in range(3)] == pytest.approx(wanted, rel=1e-12)

    def test_parameters_of_one_name_that_are_not_copies(self, folder: Path) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            pytest.skip("one rank has one parameter")
        torch.manual_seed(rank)
        with pytest.raises(
            ArgumentError, match=r"ranks 0 and 1 hold different parameters with the name 'weight'.*pass names="
        ):
            save(folder / "a", nn.Linear(3, 3))
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        with torch.no_grad():
            model.weight *= 1 + 1e-6 * rank  # copies that have drifted apart
        save(folder / "a", model)
        save(folder / "b", nn.Linear(3, 3), names=lambda name: f"{rank}.{name}")

    def test_what_is_wrong_on_one_rank_is_an_error_on_all(self, folder: Path) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        model = nn.Linear(2, 2)
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        nn.init.zeros_(model.bias)
        save(folder / "a", model)
        last = size - 1
        names = (lambda _: "x") if rank == last else None
        where = "" if rank == last else f"save: on rank {last}: "
        with pytest.raises(ArgumentError, match=rf"^{where}'bias' and 'weight' have the same name 'x'"):
            save(folder / "b", model, names=names)
        where = "" if rank == last else f"load: on rank {last}: "
        with pytest.raises(
            ArgumentError,
            match=rf"^{where}load: the checkpoint does not contain model.y.weight",
        ):
            load(folder / "a", nn.ModuleDict({"y": model}) if rank == last else model)
        other = nn.Linear(2, 2 if rank < last else 3)
        with pytest.raises(ShapeError, match=r"model.weight of shape \(2, 2\), but the model has shape \(3, 2\)"):
            load(folder / "a", other)

        if size > 1:
            with pytest.raises(ArgumentError, match=rf"path is .*b on the first rank and .*b{last} on this rank"):
                save(folder / f"b{rank or ''}" if rank == last else folder / "b", model)
        assert [one.name for one in folder.iterdir()] == ["a"]
        with initialize_model_parallel(size):
            # Ranks that share a layer find out together, too.
            mine = shard_(nn.Sequential(nn.Linear(2, 12)), {"0": "column"})
            with pytest.raises(ArgumentError if rank < last else ShapeError, match="load: "):
                load(folder / "a", mine, names=lambda name: name.partition(".")[2] if rank == last else name)

        def fail(_: str) -> str:
            raise KeyError("mine")

        with pytest.raises(KeyError if rank == last else RuntimeError, match="mine"):
            load(folder / "a", model, names=fail if rank == last else None)

    def test_groups_that_do_not_fit_on_one_rank_change_nothing(self, folder: Path) -> None:
        last = dist.get_world_size() - 1

        def optimize(model: nn.Linear, *, apart: bool) -> torch.optim.Optimizer:
            groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
            return torch.optim.SGD(groups if apart else model.parameters(), lr=0.3)

        torch.manual_seed(0)
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        save(folder / "a", model, optimize(model, apart=True))
        before = [param.clone() for param in other.parameters()]
        optimizer = optimize(other, apart=dist.get_rank() != last)
        with pytest.raises(ArgumentError, match=r"the checkpoint has lr=0.2 for 'bias' and 0.1 for other parameters"):
            load(folder / "a", other, optimizer)
        assert all(map(torch.equal, other.parameters(), before))
        assert optimizer.param_groups[0]["lr"] == (0.3 if dist.get_rank() == last else 0.1)

    def test_named_parameters_of_stages(self, folder: Path) -> None:
        """Their optimizers have names that those of another layout don't have."""
        size, rank = dist.get_world_size(), dist.get_rank()
        full = nn.Sequential(*(nn.Linear(2, 2) for _ in range(size)))
        stage = nn.Sequential(full[rank])
        optimizer = torch.optim.AdamW(stage.named_parameters(), lr=0.5)
        save(folder / "a", stage, optimizer, names=lambda name: f"{rank}{name[1:]}")
        whole = torch.optim.AdamW(full.named_parameters(), lr=0.1)
        load(folder / "a", full, whole)
        assert whole.param_groups[0]["lr"] == 0.5
        assert whole.param_groups[0]["param_names"] == [name for name, _ in full.named_parameters()]

    def test_a_cut_that_no_dtensor_can_have(self) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        with initialize_model_parallel(size) as grid:
            comm = grid.communicator("model")
            model = nn.Module()
            model.weight = nn.Parameter(torch.zeros(2 if rank else 1, 3))
            mark(model.weight, 0, None, comm)
            if size == 1:
                assert model_state(model)["weight"].shape == (1, 3)
                return
            parts = [1] + [2] * (size - 1)
            with pytest.raises(ShapeError, match=rf"'weight' is sharded along dim 0 in parts of \{parts}.*torch.chunk"):
                model_state(model)
            # Uneven, but as torch.chunk does it.
            model.weight = nn.Parameter(torch.full((3, 1 if rank == size - 1 else 2), float(rank)))
            mark(model.weight, -1, None, comm)
            whole = model_state(model)["weight"].full_tensor()
            assert whole[0].tolist() == [i // 2 for i in range(2 * size - 1)]

    def test_states_that_do_not_lie_as_their_parameter(self) -> None:
        size = dist.get_world_size()
        with initialize_model_parallel(size) as grid:
            part = Part(adamw, grid).start().train(1)
            cut = part.module.layers.get_submodule("0.up").weight
            part.optimizer.state[cut]["row"] = torch.zeros(cut.shape[0], 1)
            if size == 1:
                optimizer_state(part.module, part.optimizer)
                return
            with pytest.raises(ArgumentError, match=r"AdamW keeps 'row' of shape \(\d+, 1\) for 'layers.0.up.weight'"):
                optimizer_state(part.module, part.optimizer, part.names)

    def test_ranks_that_torch_does_not_know(self) -> None:
        world = mpicoll.world()
        comm = world.group(range(world.size))
        assert comm is not None
        model = nn.Linear(2, 2)
        mark(model.weight, 0, comm, comm)
        if comm.size == 1:
            assert not isinstance(model_state(model)["weight"], DTensor)
        else:
            with pytest.raises(CommunicatorError, match=r"'weight' is sharded among the ranks of .*init_process_group"):
                model_state(model)
        comm.free()


def test_ranks_without_a_process_group(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(
            CommunicatorError, match=r"3 ranks, but torch has no process group; call torch.distributed.init"
        ):
            save(tmp_path / "a", nn.Linear(2, 2))

    mpicoll.run_local(body, 3)


# --- one process and several


LAYOUTS_OF_TWO = ((2, 1), (1, 2), (1, 1))


def main(folder: Path) -> None:
    """Run by the ranks of the test below."""
    dist.init_process_group("mpicoll")
    for tp, pp in LAYOUTS_OF_TWO:
        with initialize_model_parallel(tp, pp) as grid:
            part = Part(adamw, grid)
            assert load(folder / "one", part.module, part.optimizer, part.names) == "one"
            part.train(3).check(3, adamw)
            save(folder / f"{tp}x{pp}", part.module, part.optimizer, (tp, pp), part.names)
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_process_and_several(tmp_path: Path) -> None:
    part = Part(adamw).start().train(1, 2)
    save(tmp_path / "one", part.module, part.optimizer, "one")
    done = mpirun(2, __file__, tmp_path, seconds=100, warm=True, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    assert done.returncode == 0, done.stdout
    for tp, pp in LAYOUTS_OF_TWO:
        whole = Part(adamw)
        assert load(tmp_path / f"{tp}x{pp}", whole.module, whole.optimizer) == (tp, pp)
        whole.check(3, adamw)
        whole.train(4).check(4, adamw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
