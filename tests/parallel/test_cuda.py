"""CUDA tensors in model parallelism, on the fake device: what it computes equals what the CPU computes.

Its work waits until somebody waits for it, so whoever forgets to wait has old values, always. Each rank computes on a
stream of its own, since the default stream is one for all ranks that are threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cuda_calls import count_announcements
from support.cuda_tensors import CudaTensor, cuda_torch, late, now
from support.ranks import Ranks
from support.stage_values import Pair
from torch import Tensor

import mpicoll
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.executors.staging import ANNOUNCEMENT_BYTES
from mpicoll.errors import CommunicationError, DeviceError
from mpicoll.parallel import gradients, mappings
from mpicoll.parallel.context_parallel import ring_attention, ulysses_attention
from mpicoll.parallel.cross_entropy import vocab_parallel_cross_entropy
from mpicoll.parallel.layers import column_parallel_linear
from mpicoll.parallel.p2p import PipeP2P
from mpicoll.parallel.p2p.message_format import MessageLayout, TensorSpec, as_bytes, copy_to_host, flatten

__all__ = ["cuda_torch"]

pytestmark = pytest.mark.usefixtures("cuda_torch")


@contextmanager
def own_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_both(compute: Callable[[Callable[..., Any]], tuple[Tensor, ...]]) -> None:
    """`compute` gets a function that makes tensors from values: on the device, or the same on the CPU; it returns what
    must not differ."""
    with own_stream():
        device = compute(lambda values, grad=False: late(values, requires_grad=grad))
        assert all(type(one) is CudaTensor for one in device)
        host = compute(lambda values, grad=False: values.clone().requires_grad_(grad))
        for one, other in zip(device, host, strict=True):
            torch.testing.assert_close(one.detach().cpu(), other.detach())


# --- mappings and layers


MAPS: dict[str, Callable[[Tensor, mpicoll.Communicator], Tensor]] = {
    "copy": mappings.copy_to_tensor_model_parallel_region,
    "reduce": mappings.reduce_from_tensor_model_parallel_region,
    "scatter": mappings.scatter_to_tensor_model_parallel_region,
    "gather": mappings.gather_from_tensor_model_parallel_region,
    "gather last": mappings.all_gather_last_dim_from_tensor_parallel_region,
    "reduce_scatter last": mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
    "scatter sequence": mappings.scatter_to_sequence_parallel_region,
    "gather sequence": lambda x, comm: mappings.gather_from_sequence_parallel_region(x, group=comm),
    "reduce_scatter sequence": mappings.reduce_scatter_to_sequence_parallel_region,
    "all_to_all": lambda x, comm: mappings.all_to_all(x, group=comm),
    "sp2hp": mappings.all_to_all_sp2hp,
    "hp2sp": mappings.all_to_all_hp2sp,
}


@pytest.mark.parametrize("name", MAPS)
def test_mappings(several: Ranks, name: str) -> None:
    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            x = make(numbers(comm.rank, comm.size, 6, comm.size), True)
            y = MAPS[name](x.transpose(0, 2) if x.dim() else x, comm)
            (y * y).sum().backward()
            return y, x.grad

        on_both(compute)

    several(body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_parallel_linear(several: Ranks, sequence_parallel: bool) -> None:
    """With reductions in the background that are large enough for a thread."""

    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            x = make(numbers(comm.rank if sequence_parallel else 9, 300, 64), True)
            weight, bias = make(numbers(10 + comm.rank, 32, 64), True), make(numbers(20 + comm.rank, 32), True)
            y = column_parallel_linear(x, weight, bias, sequence_parallel=sequence_parallel, group=comm)
            (y * y).sum().backward()
            return y, x.grad, weight.grad, bias.grad

        on_both(compute)

    several(body)


def test_cross_entropy(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            logits = make(numbers(comm.rank, 10, 7), True)
            target = make(torch.arange(10) % (7 * comm.size))
            loss = vocab_parallel_cross_entropy(logits, target, 0.1, reduction="mean", group=comm)
            loss.backward()
            return loss, logits.grad

        on_both(compute)

    several(body)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention])
def test_attention(several: Ranks, attention: Callable[..., Tensor], layout: str) -> None:
    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            parts = [make(numbers(3 * comm.rank + i, 2, 2 * comm.size, 8, 4), True) for i in range(3)]
            out = attention(*parts, causal=True, layout=layout, group=comm)
            (out * out).sum().backward()
            return out, *(one.grad for one in parts)

        on_both(compute)

    several(body)


@pytest.mark.extension
def test_ring_attention_copies_blocks_from_device_to_device(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicoll.collectives.message_buffers.MIN_ANNOUNCED_BYTES", ANNOUNCEMENT_BYTES + 1)
    announced = count_announcements(monkeypatch)
    test_attention(several, ring_attention, "zigzag")
    assert announced[True]


def test_attention_wants_one_device(some: Ranks) -> None:
    def body() -> None:
        x = torch.ones(1, 1, 2, 4)
        with pytest.raises(DeviceError, match="key is on cuda:0, query on cpu"):
            ring_attention(x, late(x), x, group=mpicoll.world())

    some(body)


# --- gradients


class Parameters:
    """Two parameters on the device, one on the CPU, and one without a gradient."""

    def __init__(self, rank: int, make: Callable[..., Any]) -> None:
        self.all = [make(numbers(i, 4, i + 1), True) for i in range(3)]
        self.all.insert(1, numbers(7, 5).requires_grad_())
        for i, one in enumerate(self.all[:3]):
            one.grad = make(numbers(100 * rank + i, *one.shape)) if i != 1 else numbers(100 * rank + i, *one.shape)


def test_gradients_are_averaged(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            parameters = Parameters(comm.rank, make).all
            gradients.average_gradients(parameters, comm)
            assert parameters[3].grad is None
            means = [one.grad for one in parameters[:3]]
            mean = sum(numbers(100 * rank + 1, 5) for rank in range(comm.size)) / comm.size
            torch.testing.assert_close(means.pop(1), mean)
            return tuple(means)

        on_both(compute)

    several(body)


def test_gradients_are_clipped_where_a_rank_has_none(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            one, other = make(numbers(3, 4), True), make(numbers(4, 3), True)
            if comm.rank < comm.size - 1:
                one.grad, other.grad = make(numbers(comm.rank, 4)), make(numbers(50 + comm.rank, 3))
            norm = gradients.clip([one, other], 0.5, 2.0, comm, first=True, copies=())
            every = [numbers(first + rank, n) for rank in range(comm.size - 1) for first, n in ((0, 4), (50, 3))]
            assert norm.device.type == "cpu"
            torch.testing.assert_close(norm, torch.cat(every).double().norm())
            return () if one.grad is None else (one.grad, other.grad)

        on_both(compute)

    several(body)


# --- from stage to stage


@contextmanager
def pipe(**options: Any) -> Iterator[PipeP2P]:
    with own_stream(), PipeP2P(mpicoll.world(), timeout=30, **options) as p2p:
        yield p2p


def value(stage: int, make: Callable[..., Any]) -> Any:
    """Large and small tensors, on the device and on the CPU, of many kinds."""
    return {
        "large": make(numbers(stage, 100, 90)),
        "small": [make(numbers(stage, 3)), torch.full((2,), stage), make(torch.tensor([True, False, stage > 1]))],
        "half": make(numbers(stage, 5, 4).bfloat16()).t(),
        "none": (None, "text", make(torch.ones(0, 3))),
        "pair": Pair(make(numbers(stage, 2), True), torch.ones(9_000)),
    }


def leaves(what: Any) -> list[Any]:
    spec_of: list[Tensor] = []
    flatten("test", what, spec_of)
    return spec_of


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("send_recv", [True, False])
def test_values_arrive(several: Ranks, send_recv: bool, background: bool) -> None:
    """On the device of the receiver, with values that the sender's stream had still to compute."""

    def body() -> None:
        with pipe(send_recv=send_recv, background=background) as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            for early in (False, True):
                if early:
                    receiving = p2p.irecv(before)
                sending = p2p.isend(value(p2p.stage, lambda x, grad=False: late(x, requires_grad=grad)), after)
                if not early:
                    p2p.poll()
                    receiving = p2p.irecv(before)
                if background:
                    deadline = time.monotonic() + 30
                    while not receiving.test() and time.monotonic() < deadline:
                        time.sleep(1e-3)
                got = receiving.wait()
                sending.wait()
                want = value(before, lambda x, grad=False: x.clone().requires_grad_(grad))
                places = value(before, lambda x, grad=False: late(x, requires_grad=grad))
                for one, other, place in zip(leaves(got), leaves(want), leaves(places), strict=True):
                    assert type(one) is type(place)
                    assert one.requires_grad == other.requires_grad
                    found = now(one) if isinstance(one, CudaTensor) else one
                    assert torch.equal(found, other)
                    if isinstance(one, CudaTensor) and one.numel():
                        assert one.memory.stream == torch.cuda.current_stream().cuda_stream, "freed too early some time"

    several(body)


def test_receiving_into_a_tensor(several: Ranks) -> None:
    """From either place to either, with strides or without; what the stream still had to do with it comes before."""

    def body() -> None:
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            for count in (6, 60_000):
                for send in (late, torch.clone):
                    for receive in (late, torch.clone):
                        for strided in (False, True):
                            request = p2p.isend(send(numbers(p2p.stage, count, 2)), after)
                            target = receive(torch.zeros(2, count).t() if strided else torch.zeros(count, 2))
                            if strided and receive is late:
                                target = late(torch.zeros(2, count)).t()
                            assert p2p.recv(target, before) is target
                            found = now(target) if isinstance(target, CudaTensor) else target
                            assert torch.equal(found, numbers(before, count, 2))
                            request.wait()

    several(body)


@pytest.mark.extension
def test_large_values_are_copied_from_device_to_device(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside small ones, into memory of the host, and when they come before their receive."""
    announced = count_announcements(monkeypatch)

    def body() -> None:
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            for turn in range(4):
                counts = {"a": 40_000, "b": 5, "c": 70_000}
                sent = {name: numbers(p2p.stage + turn, count) for name, count in counts.items()}
                value = {name: late(one, requires_grad=name == "c") for name, one in sent.items()}
                request = p2p.isend(value, after)
                if turn % 2:
                    mpicoll.barrier()
                got = p2p.recv(before)
                for name, one in sent.items():
                    assert torch.equal(now(got[name]), numbers(before + turn, one.numel()))
                    assert got[name].requires_grad == (name == "c")
                request.wait()
            host = torch.zeros(50_000)
            request = p2p.isend(late(numbers(p2p.stage, 50_000)), after)
            assert torch.equal(p2p.recv(host, before), numbers(before, 50_000))
            request.wait()

    several(body)
    assert announced[True] == 9 * (several.local or 1)


@pytest.mark.extension
@pytest.mark.parametrize("how", ["mismatch", "unreceived", "no device"])
def test_memory_of_values_that_no_receive_takes_serves_others(
    several: Ranks, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for 32 messages, which the sender would keep for those."""
    announced = count_announcements(monkeypatch)

    def body() -> None:
        with own_stream():
            p2p = PipeP2P(mpicoll.world(), timeout=30)
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            if how == "no device":
                mpicoll.barrier()
                monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
                mpicoll.barrier()
            for _ in range(3 if how == "unreceived" else 35):
                request = p2p.isend(late(numbers(p2p.stage, 20_000)), after)
                if how != "unreceived":
                    with pytest.raises(CommunicationError, match=r"was discarded|CUDA is not available"):
                        p2p.recv(before, expect=(3,) if how == "mismatch" else None)
                request.wait()
            if how == "unreceived":
                with pytest.raises(CommunicationError, match="3 values were sent here and not received"):
                    p2p.close()
            else:
                p2p.close()
            mpicoll.barrier()
            assert all(one.is_idle for one in mpicoll.world()._core.registry.peer_messages)

    several(body)
    assert announced[True]
    assert not announced[False]


def test_a_stage_without_a_device_says_so(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            sending = p2p.isend(late(torch.ones(3)), after)
            with pytest.raises(CommunicationError, match=r"was on a CUDA device, but CUDA is not available.*\.cpu\(\)"):
                p2p.recv(before)
            sending.wait()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    several(body)


def test_messages_are_the_bytes() -> None:
    with own_stream():
        what = value(3, late_)
        found = leaves(what)
        layout = MessageLayout(flatten("send", what, []))
        sent = layout.pack(found, lambda tensor: None)
        want = leaves(value(3, lambda x, grad=False: x.requires_grad_(grad)))
        for (nbytes, parts), message in zip(layout.messages, sent, strict=True):
            assert message.size == nbytes
            for index, start, stop in parts:
                assert message[start:stop].tobytes() == as_bytes(want[index]).tobytes()
        assert str(TensorSpec(torch.float32, (2,), True, "cuda")) == "float32 (2,) on cuda that requires grad"


def late_(values: Tensor, grad: bool = False) -> Any:
    return late(values, requires_grad=grad)


def test_what_a_stage_sends_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of a value by one wait."""
    with own_stream():
        tensors = [late(torch.full((n,), n)) for n in range(1, 20)]
        layout = MessageLayout(flatten("send", tensors, []))
        waits = 0
        from mpicoll.buffers.cuda.device import CudaDevice

        working = CudaDevice.working

        def counted(self: Any, after: Any = ()) -> Any:
            nonlocal waits
            waits += 1
            return working(self, after)

        monkeypatch.setattr(CudaDevice, "working", counted)
        layout.pack(tensors, lambda tensor: None)
        assert waits == 1
        copy_to_host([])
        assert waits == 1


def test_a_pipeline_of_modules(several: Ranks) -> None:
    """Activations forward and gradients back, by hand, equal to the model on one process."""

    def body() -> None:
        with pipe() as p2p:
            weights = [numbers(i, 4, 4) for i in range(p2p.stages)]
            own = late(weights[p2p.stage], requires_grad=True)
            x = late(numbers(77, 3, 4)) if p2p.stage == 0 else p2p.recv_forward()
            x = x.detach().requires_grad_()
            y = torch.tanh(x @ own)
            if p2p.stage < p2p.stages - 1:
                p2p.send_forward(y.detach())
                y.backward(p2p.recv_backward())
            else:
                (y * y).sum().backward()
            if p2p.stage > 0:
                p2p.send_backward(x.grad)
            leaves = [one.requires_grad_() for one in weights]
            z = numbers(77, 3, 4)
            for one in leaves:
                z = torch.tanh(z @ one)
            (z * z).sum().backward()
            torch.testing.assert_close(own.grad.cpu(), leaves[p2p.stage].grad)

    several(body)


@pytest.mark.extension
def test_a_rank_may_ask_before_the_ranks_have_tried(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank has asked of its device must not keep it out of the trial of all ranks."""
    announced = count_announcements(monkeypatch)

    def body() -> None:
        with mpicoll.world().duplicate() as comm:
            if comm.rank == 0:
                mpicoll.explain("allreduce", 64, like=late(torch.ones(2)), comm=comm)
            with PipeP2P(comm, timeout=20) as p2p:
                after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
                request = p2p.isend(late(numbers(p2p.stage, 20_000)), after)
                assert torch.equal(now(p2p.recv(before)), numbers(before, 20_000))
                request.wait()
            # The program's first collective selects the device of its communicator.
            assert comm.rank == 0 or core_of(comm).devices is None

    several(body)
    assert announced[True]
