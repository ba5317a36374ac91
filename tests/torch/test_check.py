"""torch's calls under MPICOLL_CHECK: mismatches by its own names, messages, NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mismatches
import pytest
import torch
import torch.distributed as dist

import mpicoll

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
    assert mismatches.check(wanted, group.comm, lambda spec, form: mismatches.torch(spec, group, form)) == ""


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
