"""torch's calls under MPICOLL_CHECK: mismatches by its own names, messages, NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import mismatches

import mpicoll
import mpicoll.torch as dropin
from mpicoll.engine.diagnostics import flight_recorder

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]

HERE = Path(__file__).name


@pytest.fixture
def checked() -> Iterator[None]:
    with mpicoll.debug(numerics=True, checksum=True):
        yield


def _several() -> None:
    if dist.get_world_size() < 2:
        pytest.skip("needs two ranks")


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@pytest.mark.parametrize("number", range(2 * len(mismatches.KINDS)))
@pytest.mark.usefixtures("checked")
def test_generated_mismatches(number: int) -> None:
    """One of each kind, blocking and in the background; `ci/mismatches.py` has more of them."""
    _several()
    group: Any = dist.group.WORLD
    wanted = mismatches.case("torch", number, dist.get_world_size(), "torch")
    comm = dropin.communicator(group)
    assert mismatches.check(wanted, comm, lambda spec, form: mismatches.torch(spec, group, form)) == ""


@pytest.mark.extension
def test_mismatches_are_noticed_by_default() -> None:
    """One of each kind, form and size, but for rows that only pairs of ranks know of."""
    _several()
    for nbytes in mismatches.NBYTES:
        for number in range(2 * len(mismatches.KINDS)):
            one = mismatches.case("by default", number, dist.get_world_size(), "torch", nbytes)
            if one.kind == "counts" and one.usual[0].operation == "alltoall":
                continue
            # Of calls that come again, the line is not kept where ranks are ahead of others.
            group: Any = dist.new_group()
            call = partial(_call_torch, group)
            assert mismatches.check(one, dropin.communicator(group), call, checked=False) == ""


def _call_torch(group: Any, spec: mismatches.Spec, form: str) -> None:
    mismatches.torch(spec, group, form)


@pytest.mark.usefixtures("checked")
def test_groups_have_names() -> None:
    _several()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert isinstance(group, dist.ProcessGroup)
        with pytest.raises(mpicoll.MismatchError) as caught:
            dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
        first, *lines = str(caught.value).splitlines()
        assert first.startswith(
            f"the ranks of torch's group {group.group_name} disagree about collective 1: rank 1 calls"
        )
        assert first.endswith("they differ in shape")
        assert f"{HERE}:" in lines[1]
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2, 2]
        dist.destroy_process_group(group)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "blocking": dist.all_reduce,
    "background": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "coalesced": lambda x: dist.all_reduce_coalesced([torch.ones(2), x]),
    "gathered": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x),
    "many gathered": lambda x: dist.all_gather_object([None] * dist.get_world_size(), x.tolist()),
    "moved": lambda x: dist.broadcast(x, dist.get_world_size() - 1),
    "negated": lambda x: dist.all_reduce(torch.complex(x, x).conj().imag),
}


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("checked")
def test_numbers(form: str) -> None:
    FORMS[form](torch.ones(4))
    x = torch.ones(4)
    if _is_last():
        x[2] = torch.nan
    if form == "many gathered":
        FORMS[form](x)  # bytes
        return
    with pytest.raises(mpicoll.NumericsError, match="1 NaN of 4 elements, the first at") as caught:
        FORMS[form](x)
    assert caught.value.ranks == (dist.get_world_size() - 1,)
    assert f"{HERE}:" in str(caught.value)
    FORMS[form](torch.ones(4))


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.usefixtures("checked")
def test_several_as_one() -> None:
    """Each of them is compared."""
    _several()
    with pytest.raises(mpicoll.MismatchError, match="they differ in part 1's") as caught:
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(4 if _is_last() else 3)])
    assert "part 1's shape" in caught.value.fields


@pytest.mark.usefixtures("checked")
def test_sparse_and_dense() -> None:
    _several()
    dense = torch.eye(3)
    with pytest.raises(mpicoll.MismatchError, match="they differ in dtype"):
        dist.all_reduce(dense.to_sparse_coo() if _is_last() else dense)
    sparse = dense.to_sparse_coo()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), dense * dist.get_world_size())


@pytest.mark.usefixtures("checked")
def test_messages() -> None:
    """Shapes may differ, as torch has it; dtypes and sizes may not."""
    _several()
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (6, 60_000):
        sending = dist.isend(torch.arange(count), right)
        got = torch.empty(count // 3, 3, dtype=torch.int64)
        assert dist.recv(got, left) == left
        sending.wait()
        assert torch.equal(got.view(-1), torch.arange(count))
        sending = dist.isend(torch.arange(count), right)
        wrong = dist.irecv(torch.empty(count, dtype=torch.float64), left)
        with pytest.raises(mpicoll.MismatchError, match="they differ in dtype") as caught:
            wrong.wait()
        assert str(caught.value).count(f"{HERE}:") == 2
        sending.wait()
        sending = dist.isend(torch.ones(count), right)
        with pytest.raises(mpicoll.TruncationError, match="they differ in size"):
            dist.recv(torch.empty(count - 1), left)
        sending.wait()
    dist.barrier()


@pytest.mark.usefixtures("checked")
def test_ddp_and_its_hooks_run() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    for hook in (False, True):
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
        if hook:
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
        gradients = torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None])
        everyone = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, gradients)
        assert all(torch.equal(one, gradients) for one in everyone)


# --- what was kept of earlier calls


@pytest.mark.parametrize("nbytes", mismatches.NBYTES)
def test_a_call_is_known_by_its_own_shape_and_dtype(nbytes: int) -> None:
    """Not by those of an earlier tensor of as many elements, or bytes."""
    size = dist.get_world_size()
    count = nbytes // 4 * size
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda x: dist.broadcast(x, 0),
        "all_gather_single": lambda x: dist.all_gather_single(x.new_empty(size * x.numel()), x),
        "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
        "reduce_scatter_single": lambda x: dist.reduce_scatter_single(x.new_empty(x.numel() // size), x),
    }
    wrong = []
    for name, call in calls.items():
        for dtype in (torch.float32, torch.int32):
            for shape in ((count,), (count // 2, 2), (count,)):
                call(torch.ones(shape, dtype=dtype))
                (_, _, told, _, _), _, _ = flight_recorder.list_history()[-1]
                if size > 1 and (told.name, told.shape, told.dtype) != (name, shape, str(dtype).removeprefix("torch.")):
                    wrong.append(f"{name} of {dtype} {shape}: {told}")
    assert wrong == []


def test_what_equals_an_op_or_a_root_is_none() -> None:
    x = torch.ones(3)
    for _ in range(2):
        dropin.all_reduce(x, dist.ReduceOp.MAX)
        dropin.broadcast(x, 1 % dist.get_world_size())
    with pytest.raises((TypeError, mpicoll.MpicollError)):
        dropin.all_reduce(x, hash(dist.ReduceOp.MAX))
    with pytest.raises((TypeError, mpicoll.MpicollError)):
        dropin.broadcast(x, float(1 % dist.get_world_size()))  # type: ignore[arg-type]
