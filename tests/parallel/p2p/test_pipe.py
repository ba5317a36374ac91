"""Values from stage to stage."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks
from support.stage_values import DTYPES, Pair, same, tensor, value

import mpicoll
from mpicoll import run_local
from mpicoll.engine.core.poller import poller
from mpicoll.errors import (
    CommunicationError,
    CommunicatorError,
    DeviceError,
    DTypeError,
    MpicollError,
    RankError,
    RankFailed,
    ShapeError,
    Timeout,
)
from mpicoll.parallel import p2p as module
from mpicoll.parallel.p2p import PipeP2P, init_process_groups
from mpicoll.transport.local import Delay, Kill

SHORT = 0.3
"""Seconds until what can't come about is given up."""

ways = pytest.mark.parametrize("send_recv", [True, False], ids=["messages", "broadcasts"])


def pipe(**options: Any) -> PipeP2P:
    return PipeP2P(mpicoll.world(), **{"timeout": 20.0, **options})


VALUES: list[Callable[[int], Any]] = [
    *(lambda seed, dtype=dtype: (torch.arange(6).view(2, 3) + seed).to(dtype) for dtype in DTYPES),
    lambda seed: torch.tensor(seed, dtype=torch.float64),
    lambda seed: torch.empty(3, 0, 2),
    lambda seed: torch.arange(float(seed), seed + 24).view(4, 6).t()[::2],
    lambda seed: torch.ones(3).expand(4, 3),
    lambda seed: torch.complex(torch.ones(3), torch.full((3,), float(seed))).conj(),
    lambda seed: torch.full((70_000,), seed, dtype=torch.int16),
    lambda seed: torch.ones(3, requires_grad=True),
    lambda seed: torch.ones(3, requires_grad=True) * seed,
    lambda seed: torch.nn.Parameter(torch.full((2,), float(seed))),
    lambda seed: None,
    lambda seed: (),
    lambda seed: f"text {seed}",
    lambda seed: (torch.ones(2), [torch.zeros(5000), {"a": torch.ones(20_000), 3: None}], seed, Pair(1, torch.ones(1))),
]


@ways
def test_values_arrive(several: Ranks, send_recv: bool) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv) as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            for make in VALUES:
                sent = make(p2p.stage)
                request = p2p.isend(sent, after)
                got = p2p.recv(before)
                assert request.wait() is None
                expected = make(before)
                if isinstance(expected, torch.Tensor):
                    expected = torch.Tensor.resolve_conj(expected.detach()).requires_grad_(expected.requires_grad)
                    assert type(got) is torch.Tensor
                    assert got.is_contiguous()
                    assert got.is_leaf
                assert same(got, expected)

    several(body)


@ways
def test_blocking_forms(several: Ranks, send_recv: bool) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv) as p2p:
            assert p2p.can_send_recv() is send_recv
            for seed in range(6):
                if p2p.stage > 0:
                    assert same(p2p.recv(p2p.stage - 1), torch.arange(seed * 3_000.0))
                    assert p2p.recv_obj(p2p.stage - 1) == {"seed": seed, "from": p2p.stage - 1}
                if p2p.stage < p2p.stages - 1:
                    p2p.send(torch.arange(seed * 3_000.0), p2p.stage + 1)
                    p2p.send_obj({"seed": seed, "from": p2p.stage}, p2p.stage + 1)

    several(body)


def test_stages_that_are_not_adjacent(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            for other in range(p2p.stages):
                if other != p2p.stage:
                    p2p.isend(torch.full((other,), p2p.stage), other)
            for other in range(p2p.stages):
                if other != p2p.stage:
                    assert same(p2p.recv(other), torch.full((p2p.stage,), other))
            p2p.wait()

    several(body)


def test_a_header_goes_only_before_a_change(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            sizes: list[int] = []
            isend = p2p._wire.isend

            def counting(data: Any, dest: int, tag: int) -> Any:
                sizes.append(data.size)
                return isend(data, dest, tag)

            p2p._wire.isend = counting
            p2p._repeated.close()  # what the extension sends is not counted
            program = [
                (torch.ones(4), 2),  # the first: header and data
                (torch.zeros(4), 1),
                (torch.ones(4).double().float(), 1),
                (torch.ones(4, requires_grad=True), 2),
                (torch.ones(4, requires_grad=True), 1),
                (torch.ones(2, 2), 2),
                ((torch.ones(2, 2),), 2),
                ((torch.ones(2, 2),), 1),
                ([torch.ones(2), torch.ones(9_000), torch.ones(3), {"step": 1}], 4),
                ([torch.ones(2), torch.ones(9_000), torch.ones(3), {"step": 1}], 3),
                ([torch.ones(2), torch.ones(9_000), torch.ones(3), {"step": 2}], 4),
                ([*torch.ones(9, 2), torch.ones(9_000)], 3),  # of the data, small tensors are one message
                ([*torch.ones(9, 2), torch.ones(9_000)], 2),
                (None, 2),
                (None, 1),
            ]
            if p2p.stage == 0:
                for what, messages in program:
                    sizes.clear()
                    p2p.isend(what, 1)
                    assert len(sizes) == messages
            elif p2p.stage == 1:
                for what, _ in program:
                    assert same(p2p.recv(0), what)
                assert sizes == []
            p2p.wait()

    several(body)


def test_lines_have_headers_of_their_own(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            for step in range(3):
                for channel in range(4):
                    what = torch.full((channel, step), p2p.stage)
                    p2p.isend(what, (p2p.stage + 1) % p2p.stages, channel=channel)
            before = (p2p.stage - 1) % p2p.stages
            for channel in (2, 0, 3, 1):
                for step in range(3):
                    assert same(p2p.recv(before, channel=channel), torch.full((channel, step), before))
            p2p.wait()

    several(body)


def test_a_given_tensor_is_filled(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 0:
                for _ in range(8):
                    p2p.isend(torch.arange(6.0).view(2, 3), 1)
                p2p.wait()
            elif p2p.stage == 1:
                expected = torch.arange(6.0).view(2, 3)
                whole, strided, leaf = torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 3, requires_grad=True)
                part = torch.zeros(4, 3)
                for into in (whole, strided, leaf, part[1:3]):
                    assert p2p.recv(into, 0) is into
                    assert torch.equal(into.detach(), expected)
                assert leaf.requires_grad
                assert part.sum() == 15
                requests = [p2p.irecv(into.detach().zero_(), 0) for into in (whole, strided)]
                assert all(torch.equal(one.wait(), expected) for one in requests)
                # One that is on its way already when it is asked for.
                p2p.recv(tensor=whole.zero_(), stage=0)
                assert torch.equal(whole, expected)
                x = torch.ones(2, 3, requires_grad=True)
                product = x * whole
                p2p.recv(whole, 0)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    product.sum().backward()

    several(body)


def test_a_value_may_be_expected(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 0:
                for _ in range(4):
                    p2p.send(torch.ones(2, 3), 1)
            elif p2p.stage == 1:
                p2p.recv(0, expect=(2, 3))
                p2p.recv(0, expect=torch.Size([2, 3]))
                p2p.recv(0, expect=torch.empty(2, 3, device="meta"))
                assert p2p.recv(stage=0, expect=[2, np.int64(3)]).shape == (2, 3)

    several(body)


# The combined forms


def what_goes(stage: int, direction: str, step: int) -> torch.Tensor:
    return torch.full((stage + 1, step + 2), 100.0 * stage + step + (0.5 if direction == "backward" else 0))


def neighbour(p2p: PipeP2P, step: int, ring: bool) -> int | None:
    stage = p2p.stage + step
    return stage % p2p.stages if ring or 0 <= stage < p2p.stages else None


@ways
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("channel", [0, 255])
def test_exchanges(several: Ranks, send_recv: bool, ring: bool, channel: int) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv) as p2p:
            before, after = neighbour(p2p, -1, ring), neighbour(p2p, 1, ring)
            for step in range(3):
                forward, backward = (what_goes(p2p.stage, one, step) for one in ("forward", "backward"))
                from_before = None if before is None else what_goes(before, "forward", step)
                from_after = None if after is None else what_goes(after, "backward", step)
                options: Any = {"ring": ring, "channel": channel}
                got = p2p.send_forward_backward_recv_forward_backward(forward, backward, **options)
                assert same(got, (from_before, from_after))
                assert same(p2p.send_forward_recv_forward(forward, **options), from_before)
                assert same(p2p.send_backward_recv_backward(backward, **options), from_after)

    several(body)


@ways
def test_one_direction_at_a_time(several: Ranks, send_recv: bool) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv) as p2p:
            for step in range(3):
                came = p2p.recv_forward()
                assert same(came, None if p2p.stage == 0 else what_goes(p2p.stage - 1, "forward", step))
                assert p2p.send_forward(what_goes(p2p.stage, "forward", step)) is None
            for step in range(3):
                came = p2p.recv_backward()
                last = p2p.stage == p2p.stages - 1
                assert same(came, None if last else what_goes(p2p.stage + 1, "backward", step))
                assert p2p.send_backward(what_goes(p2p.stage, "backward", step)) is None

    several(body)


def weight(stage: int) -> torch.Tensor:
    return (torch.arange(9.0, dtype=torch.float64).view(3, 3) / 10 + stage).requires_grad_()


def inputs(batch: int) -> torch.Tensor:
    return torch.full((2, 3), batch + 1.0, dtype=torch.float64)


def alone(stages: int, batches: int) -> list[torch.Tensor]:
    weights = [weight(stage) for stage in range(stages)]
    for batch in range(batches):
        x = inputs(batch)
        for one in weights:
            x = torch.tanh(x @ one)
        x.sum().backward()
    return [one.grad for one in weights if one.grad is not None]


@ways
@pytest.mark.parametrize("batches", [1, 5])
def test_one_forward_one_backward(several: Ranks, send_recv: bool, batches: int) -> None:
    """Megatron's schedule, with its six forms, against the same chain in one process."""

    def body() -> None:
        with pipe(send_recv=send_recv) as p2p:
            own = weight(p2p.stage)
            last = p2p.stage == p2p.stages - 1
            kept: list[tuple[torch.Tensor | None, torch.Tensor]] = []
            begun = iter(range(batches))

            def forward(x: torch.Tensor | None) -> torch.Tensor:
                batch = next(begun)
                out = torch.tanh((inputs(batch) if x is None else x) @ own)
                kept.append((x, out.sum() if last else out))
                return out

            def backward(grad: torch.Tensor | None) -> Any:
                x, out = kept.pop(0)
                out.backward(grad)
                return None if x is None else x.grad

            ahead = min(p2p.stages - 1 - p2p.stage, batches)
            for _ in range(ahead):
                p2p.send_forward(forward(p2p.recv_forward()))
            steady = batches - ahead
            x = p2p.recv_forward() if steady else None
            for number in range(steady):
                grad = p2p.send_forward_recv_backward(forward(x))
                if number < steady - 1:
                    x = p2p.send_backward_recv_forward(backward(grad))
                else:
                    p2p.send_backward(backward(grad))
            for _ in range(ahead):
                p2p.send_backward(backward(p2p.recv_backward()))
            assert own.grad is not None
            torch.testing.assert_close(own.grad, alone(p2p.stages, batches)[p2p.stage], rtol=1e-12, atol=0)

    several(body)


def test_forward_and_backward_between_two_stages_keep_apart(several: Ranks) -> None:
    def body() -> None:
        p2p = PipeP2P(mpicoll.world().split(mpicoll.world().rank // 2, 0), timeout=20)
        if p2p.stages == 2:
            # Both directions go to the same stage, and are received in another order than they were sent.
            forward, backward = torch.ones(2), torch.zeros(3)
            if p2p.stage == 0:
                got = p2p.send_forward_backward_recv_forward_backward(forward, backward, ring=True)
                assert same(got, (forward * 2, backward - 2))
            else:
                assert same(p2p.recv_backward(ring=True), backward)
                p2p.send_backward(backward - 2, ring=True)
                p2p.send_forward(forward * 2, ring=True)
                assert same(p2p.recv_forward(), forward)
        p2p.close()

    several(body)


def test_one_stage_alone(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with PipeP2P(world.split(world.rank), timeout=SHORT) as p2p:
            assert p2p.recv_forward() is None
            assert p2p.send_forward_recv_backward(torch.ones(2)) is None
            both = p2p.send_forward_backward_recv_forward_backward(torch.ones(2), torch.ones(2))
            assert both == (None, None)
            with pytest.raises(RankError, match=r"send_forward: stage 0 \(global rank \d\) can't send to itself"):
                p2p.send_forward(torch.ones(2), ring=True)

    ranks(body)


# Many at once


def programs(stages: int, seed: int, adjacent: bool) -> list[tuple[int, int, int, int]]:
    """Transfers in an order in which they could be carried out one by one: source, dest, channel, number."""
    generator = random.Random(seed)
    transfers = []
    for number in range(generator.randrange(1, 13)):
        source = generator.randrange(stages)
        step = generator.choice([1, -1]) if adjacent else generator.randrange(1, stages)
        transfers.append((source, (source + step) % stages, generator.choice([0, 0, 1, 255]), number))
    return transfers


def carry_out(p2p: PipeP2P, seed: int, adjacent: bool) -> None:
    """This stage's part of a random program."""
    own = random.Random(seed * 31 + p2p.stage)
    requests: list[tuple[mpicoll.Request, Any]] = []
    for source, dest, channel, number in programs(p2p.stages, seed, adjacent):
        what = value(random.Random(seed * 1000 + number))
        objects = random.Random(number).random() < 0.2
        later = own.random() < 0.5
        if p2p.stage == source:
            if objects:
                p2p.send_obj(number, dest, channel=channel)
            elif later:
                requests.append((p2p.isend(what, dest, channel=channel), None))
            else:
                p2p.send(what, dest, channel=channel)
        elif p2p.stage == dest:
            if objects:
                assert p2p.recv_obj(source, channel=channel) == number
            elif later:
                requests.append((p2p.irecv(source, channel=channel), what))
            else:
                assert same(p2p.recv(source, channel=channel), what)
        if own.random() < 0.2:
            p2p.poll()
        if requests and own.random() < 0.3 and own.random() < 0.5:
            requests[-1][0].test()
    if own.random() < 0.5:
        p2p.wait()
        assert all(one.test() for one, _ in requests)
    own.shuffle(requests)
    for request, what in requests:
        assert same(request.wait(), what)


@pytest.mark.parametrize("background", [False, True])
def test_random_programs(several: Ranks, background: bool) -> None:
    def body() -> None:
        with pipe(background=background) as p2p:
            for seed in range(70):
                carry_out(p2p, seed, adjacent=False)
            assert p2p.poll() == 0

    several(body)


def test_random_programs_by_broadcasts(several: Ranks) -> None:
    def body() -> None:
        with pipe(send_recv=False) as p2p:
            for seed in range(20):
                carry_out(p2p, seed, adjacent=True)

    several(body)


@pytest.mark.parametrize("seed", range(5))
def test_channels_in_any_order(several: Ranks, seed: int) -> None:
    def body() -> None:
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            order = [channel for channel in range(6) for _ in range(4)]
            actions = [(kind, channel) for channel in order for kind in ("send", "recv")]
            random.Random(seed * 10 + p2p.stage).shuffle(actions)
            sent, received = [0] * 6, [0] * 6
            requests = []
            for kind, channel in actions:
                if kind == "send":
                    what = torch.full((channel + 1, 3000), sent[channel])
                    p2p.isend(what, after, channel=channel)
                    sent[channel] += 1
                else:
                    requests.append((channel, received[channel], p2p.irecv(before, channel=channel)))
                    received[channel] += 1
                p2p.poll()
            random.Random(seed).shuffle(requests)
            for channel, number, request in requests:
                assert same(request.wait(), torch.full((channel + 1, 3000), number))
            p2p.wait()

    several(body)


def test_several_threads_of_one_stage(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            failures: list[BaseException] = []

            def run(channel: int) -> None:
                try:
                    for number in range(20):
                        request = p2p.isend(torch.full((channel + 1,), number), after, channel=channel)
                        assert same(p2p.recv(before, channel=channel), torch.full((channel + 1,), number))
                        request.wait()
                except BaseException as error:  # noqa: BLE001  for the main thread to raise
                    failures.append(error)

            threads = [threading.Thread(target=run, args=(channel,)) for channel in range(3)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            assert failures == []

    several(body)


# Requests


def test_requests(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 1:
                request = p2p.irecv(0)
                assert not request.test()
                with pytest.raises(Timeout, match=r"irecv from stage 0 .*received nothing within 0.01 s"):
                    request.wait(0.01)
                assert p2p.poll() == 1
                p2p.send_obj("go", 0)
                assert same(request.wait(), torch.ones(3))
                assert request.test()
                assert request.wait() is request.wait()
                assert p2p.poll() == 0
                others = [p2p.irecv(0), p2p.irecv(0)]
                assert [len(one) for one in mpicoll.waitall(others)] == [1, 2]
            elif p2p.stage == 0:
                assert p2p.recv_obj(1) == "go"
                p2p.isend(torch.ones(3), 1)
                p2p.isend(torch.ones(1), 1)
                p2p.isend(torch.ones(2), 1)
                p2p.wait()
                assert p2p.poll() == 0

    several(body)


def test_polling_moves_what_is_pending(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage < 2:
                other = 1 - p2p.stage
                requests = [p2p.isend(torch.ones(300_000), other), p2p.irecv(other)]
                deadline = time.monotonic() + 20
                while p2p.poll() and time.monotonic() < deadline:
                    time.sleep(1e-4)
                assert all(one.test() for one in requests)

    several(body)


def test_a_thread_moves_what_is_pending(several: Ranks) -> None:
    def body() -> None:
        with pipe(background=True) as p2p:
            if p2p.stage < 2:
                other = 1 - p2p.stage
                p2p.isend(torch.ones(300_000), other)
                request = p2p.irecv(other)
                deadline = time.monotonic() + 20
                while not request._handle._operation._ended and time.monotonic() < deadline:
                    time.sleep(1e-3)
                assert request._handle._operation._ended
                assert request.wait().sum() == 300_000
                p2p.wait()

    several(body)


def test_nothing_is_kept(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            kept: list[weakref.ref[torch.Tensor]] = []
            for _ in range(100):
                x = torch.ones(5000)
                sending = p2p.isend(x, after)
                got = p2p.irecv(before).wait()
                sending.wait()
                kept += [weakref.ref(x), weakref.ref(got)]
                del x, got, sending
            assert sum(one() is not None for one in kept) <= 4
            assert len(p2p._progress._pending) <= 64
            p2p.wait()
            assert not p2p._progress._pending
            assert all(not peer.num_needed for peer in p2p._mux.peers.values())

    several(body)


# What goes wrong

HERE = r"stage 1 \(global rank 1\)"
THERE = r"stage 0 \(global rank 0\)"

MISMATCHES: list[tuple[str, Callable[[PipeP2P], Any], Callable[[PipeP2P], Any], str, str]] = [
    (
        "shape",
        lambda p2p: p2p.send(torch.ones(2, 3, requires_grad=True), 1),
        lambda p2p: p2p.recv(torch.zeros(3, 2), 0),
        r"float32 \(2, 3\) that requires grad",
        r"float32 \(3, 2\)",
    ),
    (
        "dtype",
        lambda p2p: p2p.send(torch.ones(2, 3), 1),
        lambda p2p: p2p.recv(torch.zeros(2, 3, dtype=torch.int32), 0),
        r"float32 \(2, 3\)",
        r"int32 \(2, 3\)",
    ),
    (
        "expected shape",
        lambda p2p: p2p.send(torch.ones(2, 3), 1),
        lambda p2p: p2p.recv(0, expect=(2, 4)),
        r"float32 \(2, 3\)",
        r"a tensor of shape \(2, 4\)",
    ),
    (
        "structure",
        lambda p2p: p2p.send((torch.ones(2), None), 1),
        lambda p2p: p2p.recv(0, expect=torch.ones(2)),
        r"\(float32 \(2,\), None\)",
        r"float32 \(2,\)",
    ),
    (
        "object for tensors",
        lambda p2p: p2p.send_obj([1, 2], 1),
        lambda p2p: p2p.recv(0),
        r"an object, sent by send_obj",
        r"tensors, sent by send or isend",
    ),
    (
        "tensors for an object",
        lambda p2p: p2p.send([torch.ones(2)], 1),
        lambda p2p: p2p.recv_obj(0),
        r"\[float32 \(2,\)\]",
        r"an object, sent by send_obj",
    ),
    (
        "large",
        lambda p2p: p2p.send([torch.ones(30_000), torch.ones(20_000)], 1),
        lambda p2p: p2p.recv(torch.zeros(30_000), 0),
        r"\[float32 \(30000,\), float32 \(20000,\)\]",
        r"float32 \(30000,\)",
    ),
]
mismatches = pytest.mark.parametrize(
    ("send", "recv", "sent", "expected"), [one[1:] for one in MISMATCHES], ids=[one[0] for one in MISMATCHES]
)


def check_usable(p2p: PipeP2P) -> None:
    if p2p.stage == 0:
        p2p.send(torch.arange(5), 1)
        p2p.send_obj("still", 1)
    elif p2p.stage == 1:
        assert same(p2p.recv(0), torch.arange(5))
        assert p2p.recv_obj(0) == "still"


@mismatches
def test_both_stages_learn_of_a_mismatch(some_more: Ranks, send: Any, recv: Any, sent: str, expected: str) -> None:
    def body() -> None:
        with pipe() as p2p:
            what = f"{THERE} sent {sent}, but {HERE} expected {expected}"
            if p2p.stage == 0:
                with pytest.raises(CommunicationError, match=rf"^{THERE}: send\w* of .* to {HERE}: {what}$"):
                    send(p2p)
            elif p2p.stage == 1:
                with pytest.raises(
                    CommunicationError,
                    match=rf"^{HERE}: recv\w* from {THERE}: {what}; the value was discarded",
                ):
                    recv(p2p)
            check_usable(p2p)

    some_more(body)


@mismatches
def test_a_mismatch_of_what_came_before_it_was_asked_for(
    several: Ranks, send: Any, recv: Any, sent: str, expected: str
) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 0:
                with pytest.raises(CommunicationError, match=f"{HERE} expected {expected}"):
                    send(p2p)
                p2p.send(None, 1, channel=9)
            elif p2p.stage == 1:
                with pytest.raises(Timeout):
                    p2p.recv(0, channel=9, timeout=0.2)
                with pytest.raises(CommunicationError, match=f"{THERE} sent {sent}, but .* expected {expected}"):
                    recv(p2p)
                p2p.recv(0, channel=9)
            check_usable(p2p)

    several(body)


def test_wrong_order(several: Ranks) -> None:
    """Each value of the wrong kind is taken off the line, for which the receiver gets an error."""

    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 0:
                requests = [p2p.isend(torch.ones(2), 1), p2p.isend(torch.ones(3), 1)]
                for one in requests:
                    one.wait()  # who doesn't wait for the receiver doesn't learn of it
            elif p2p.stage == 1:
                for size in (3, 2):
                    with pytest.raises(CommunicationError, match=rf"sent float32 \({5 - size},\), but"):
                        p2p.recv(torch.zeros(size), 0)
            check_usable(p2p)

    several(body)


def test_mismatches_in_the_background(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 0:
                for _ in range(3):
                    p2p.isend(torch.ones(2), 1)
                p2p.wait()
            elif p2p.stage == 1:
                wrong, right, dropped = (p2p.irecv(torch.zeros(size), 0) for size in (3, 2, 4))
                assert same(right.wait(), torch.ones(2))
                assert wrong.test()
                for _ in range(2):
                    with pytest.raises(CommunicationError, match=r"irecv from .*expected float32 \(3,\)"):
                        wrong.wait()
                del dropped
                with pytest.raises(CommunicationError, match=r"expected float32 \(4,\)"):
                    p2p.wait()
                p2p.wait()  # everybody was told
                assert p2p.poll() == 0
            check_usable(p2p)

    several(body)


@ways
def test_mismatches_in_exchanges(some_more: Ranks, send_recv: bool) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv) as p2p:
            if p2p.stage == 0:
                with pytest.raises(CommunicationError, match=r"send_forward_recv_backward of float32 \(2,\) to"):
                    p2p.send_forward_recv_backward(torch.ones(2))
                assert same(p2p.send_forward_recv_backward(torch.ones(2)), torch.zeros(4))
            elif p2p.stage == 1:
                with pytest.raises(CommunicationError, match=rf"recv_forward from {THERE}: .*expected a tensor of"):
                    p2p.recv_forward(expect=(3,))
                p2p.send_backward(torch.ones(4))
                assert same(p2p.recv_forward(torch.ones(2)), torch.ones(2))
                p2p.send_backward(torch.zeros(4))
            check_usable(p2p)

    some_more(body)


@ways
def test_no_rank_sends(some_more: Ranks, send_recv: bool) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv, timeout=SHORT) as p2p:
            if p2p.stage == 1:
                begin = time.monotonic()
                nothing = rf"^{HERE}: %s from {THERE}%s: received nothing within 0.3 s; expected %s$"
                with pytest.raises(Timeout, match=nothing % ("recv", "", r"float64 \(2, 3\)")):
                    p2p.recv(torch.zeros(2, 3).double(), 0)
                with pytest.raises(Timeout, match=nothing % ("recv", ", channel 7", "tensors, .*")):
                    p2p.recv(0, channel=7)
                with pytest.raises(Timeout, match=nothing % ("recv_forward", "", r"a tensor of shape \(4,\)")):
                    p2p.recv_forward(expect=[4])
                assert time.monotonic() - begin < 20
                p2p.timeout = 20
                # What was given up swallows nothing.
                p2p.send_obj("go", 0)
                assert same(p2p.recv(0), torch.ones(2))
                assert same(p2p.recv_forward(), torch.zeros(2))
                assert p2p.recv_obj(0) == 5
            p2p.timeout = 20
            if p2p.stage == 0:
                assert p2p.recv_obj(1) == "go"
                p2p.send(torch.ones(2), 1)
                p2p.send_forward(torch.zeros(2))
                p2p.send_obj(5, 1)

    some_more(body)


@pytest.mark.parametrize(
    ("size", "send_recv"), [(3, True), (300_000, True), (3, False)], ids=["small", "large", "broadcasts"]
)
def test_no_rank_receives(some_more: Ranks, size: int, send_recv: bool) -> None:
    def body() -> None:
        with pipe(send_recv=send_recv, timeout=SHORT) as p2p:
            if p2p.stage == 1:
                late = "the value was not received within 0.3 s; the send is still pending"
                nothing = rf"^{HERE}: %s of %s to {THERE}%s: {late}$"
                with pytest.raises(Timeout, match=nothing % ("send", rf"float32 \({size},\)", ", channel 4")):
                    p2p.send(torch.ones(size), 0, channel=4)
                with pytest.raises(Timeout, match=nothing % ("send_obj", r"an object of \d+ bytes", "")):
                    p2p.send_obj(bytes(size), 0)
                with pytest.raises(Timeout, match=nothing % ("send_backward", rf"\(float32 \({size},\), None\)", "")):
                    p2p.send_backward((torch.ones(size), None))
                p2p.timeout = 20
                p2p.send_obj("go", 0, channel=1)
            p2p.timeout = 20
            if p2p.stage == 0:
                assert p2p.recv_obj(1, channel=1) == "go"
                assert same(p2p.recv(1, channel=4), torch.ones(size))
                assert p2p.recv_obj(1) == bytes(size)
                assert same(p2p.recv_backward(), (torch.ones(size), None))

    some_more(body)


@pytest.mark.parametrize("size", [3, 300_000])
def test_both_send_first(some_more: Ranks, size: int) -> None:
    def body() -> None:
        with pipe(timeout=SHORT) as p2p:
            p2p.timeout = 20
            other = 1 - p2p.stage
            if p2p.stage < 2:
                text = rf"send of float32 .* to stage {other} .*That stage has sent float32 \({size},\)"
                with pytest.raises(Timeout, match=text):
                    p2p.send(torch.ones(size), other, timeout=SHORT)
            mpicoll.barrier()
            if p2p.stage < 2:
                assert same(p2p.recv(other), torch.ones(size))
                # In the background, or as an exchange, it is no problem.
                request = p2p.isend(torch.ones(size), other)
                assert same(p2p.recv(other), torch.ones(size))
                request.wait()

    some_more(body)


def test_an_exchange_that_fails_takes_no_later_value(some_more: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 1:
                p2p.timeout = SHORT
                with pytest.raises(CommunicationError, match=r"recv_forward|send_forward_backward_recv"):
                    # What comes forward is refused, and nothing comes backward from a stage that is busy.
                    p2p.send_forward_backward_recv_forward_backward(torch.ones(2), torch.ones(2), (3,), ring=True)
                p2p.timeout = 20
                p2p.send_obj("failed", 0)
                p2p.send_obj("failed", 2)
                assert same(p2p.recv_backward(), torch.zeros(5))
            elif p2p.stage == 0:
                with pytest.raises(CommunicationError, match="expected a tensor of shape"):
                    p2p.send_forward(torch.ones(4))
                assert same(p2p.recv_backward(), torch.ones(2))
                assert p2p.recv_obj(1) == "failed"
            elif p2p.stage == 2:
                assert p2p.recv_obj(1) == "failed"
                assert same(p2p.recv_forward(), torch.ones(2))
                p2p.send_backward(torch.zeros(5))

    if some_more.size == 2:
        pytest.skip("needs three ranks")
    some_more(body)


def test_a_wrong_channel_is_named(some_more: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage == 0:
                p2p.send(torch.ones(2), 1, channel=3)
            elif p2p.stage == 1:
                with pytest.raises(Timeout, match=r"That stage has sent float32 \(2,\), channel 3, which was not"):
                    p2p.recv(0, channel=2, timeout=SHORT)
                p2p.recv(0, channel=3)

    some_more(body)


@pytest.mark.mpi
def test_a_large_value_that_no_rank_receives_stays_pending() -> None:
    with pipe(timeout=SHORT) as p2p:
        if p2p.stages == 1:
            pytest.skip("needs two ranks")
        p2p.timeout = 20
        if p2p.stage == 0:
            request = p2p.isend(torch.ones(2_000_000), 1)
            with pytest.raises(Timeout, match=r"isend of float32 \(2000000,\) to stage 1 .*not received within 0.3 s"):
                request.wait(SHORT)
            with pytest.raises(Timeout, match="isend of float32"):
                p2p.wait(SHORT)
            assert p2p.poll() == 1
            p2p.send_obj("now", 1, channel=2)
            request.wait()
        elif p2p.stage == 1:
            # Without anything wanted from stage 0, nothing is taken from it.
            time.sleep(3 * SHORT)
            assert p2p.recv_obj(0, channel=2) == "now"
            assert p2p.recv(0).sum() == 2_000_000


def test_wrong_arguments(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            x = torch.ones(2)
            other = (p2p.stage + 1) % p2p.stages
            for stage in (-1, p2p.stages, None, 1.5, "0"):
                with pytest.raises(RankError, match=rf"send: stage must be in \[0, {p2p.stages}\), got .*stage \d"):
                    p2p.send(x, stage)
                with pytest.raises(RankError, match="recv_obj: stage must be in"):
                    p2p.recv_obj(stage)
            for call in (p2p.send, p2p.isend, p2p.send_obj, p2p.recv, p2p.irecv):
                with pytest.raises(RankError, match=rf"stage {p2p.stage} .*can't send to itself"):
                    call(x, p2p.stage)
            for channel in (-1, 256, None, 0.5):
                with pytest.raises(RankError, match=r"channel must be in \[0, 256\)"):
                    p2p.isend(x, other, channel=channel)
                with pytest.raises(RankError, match=r"channel must be in \[0, 256\)"):
                    p2p.send_forward(x, channel=channel, ring=True)
            with pytest.raises(ShapeError, match="recv: expect must be a shape or a tensor, got 3"):
                p2p.recv(other, expect=3)
            with pytest.raises(
                DTypeError, match=r"recv: pass a stage, or a tensor and a stage; the first argument is a list"
            ):
                p2p.recv([x], other)
            with pytest.raises(ShapeError, match="irecv: elements of an output share memory"):
                p2p.irecv(torch.zeros(1).expand(4), other)
            with pytest.raises(DTypeError, match="irecv: pass dense tensors"):
                p2p.irecv(x.to_sparse(), other)
            with pytest.raises(DeviceError, match="send_forward: a tensor is on meta"):
                p2p.send_forward((x, torch.ones(2, device="meta")), ring=True)
            with pytest.raises(DTypeError, match="send_obj: a function can't be pickled"):
                p2p.send_obj(lambda: None, other)
            assert p2p.poll() == 0

    several(body)


def test_broadcasts_reach_adjacent_stages_only() -> None:
    def body() -> None:
        p2p = pipe(send_recv=False)
        with pytest.raises(RankError, match=r"isend: stage \d is not adjacent to stage \d"):
            p2p.isend(torch.ones(2), (p2p.stage + 2) % 4)
        p2p.close()

    run_local(body, 4)


def test_ends(several: Ranks) -> None:
    def body() -> None:
        p2p = pipe()
        p2p.close()
        p2p.free()
        assert "closed" in repr(p2p)
        calls: list[Callable[[], Any]] = [
            lambda: p2p.send(torch.ones(2), 0),
            lambda: p2p.irecv(0),
            lambda: p2p.recv_obj(0),
            lambda: p2p.send_forward_recv_forward(torch.ones(2), ring=True),
            p2p.poll,
            p2p.wait,
        ]
        for one in calls:
            with pytest.raises(CommunicatorError, match=r"<PipeP2P: stage \d .* closed> can't be used"):
                one()
        comm = mpicoll.world().split(0)
        assert comm is not None
        comm.free()
        with pytest.raises(CommunicatorError, match="was freed"):
            PipeP2P(comm)

    several(body)


def test_the_communicator_may_be_freed_first(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world().split(0)
        assert comm is not None
        with PipeP2P(comm, timeout=20) as p2p:
            comm.free()
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            p2p.isend(torch.ones(2), after)
            assert same(p2p.recv(before), torch.ones(2))

    several(body)


def test_values_by_broadcasts_are_counted(several: Ranks) -> None:
    """What is under way of them keeps a receive from being taken for one that can never complete."""

    def body() -> None:
        world = mpicoll.world()

        def counted() -> list[np.ndarray[Any, Any]]:
            traffic, found = world._core.transport.traffic, []
            for tally in () if traffic is None else (traffic.sent, traffic.received):
                found.append(np.zeros(world.size, np.int64))
                for (peer, _), number in tally.items():
                    found[-1][peer] += number
            return found

        before = counted()
        with pipe(send_recv=False) as p2p:
            following, previous = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            request = p2p.isend(torch.ones(3), following)
            p2p.recv(previous)
            request.wait()
        moved = [after - one for one, after in zip(before, counted(), strict=True)]
        if moved:
            sent, received = moved
            assert sent[following] > 0
            assert np.array_equal(mpicoll.alltoall(sent), received)

    several(body)


def test_other_messages_of_the_communicator_are_left_alone(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()
        with pipe() as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            request = mpicoll.isend(np.arange(3), after)
            p2p.isend(torch.ones(2), after)
            assert mpicoll.probe(before).nbytes == 24
            assert same(p2p.recv(before), torch.ones(2))
            assert mpicoll.allreduce(np.ones(1))[0] == comm.size
            assert mpicoll.recv(np.zeros(3, int), before).tolist() == [0, 1, 2]
            request.wait()

    several(body)


@ways
def test_closing_reports_messages_that_were_not_received(several: Ranks, send_recv: bool) -> None:
    def body() -> None:
        p2p = pipe(send_recv=send_recv)
        if p2p.stage == 0:
            p2p.isend(torch.ones(2), 1)
            p2p.isend(torch.ones(400_000), 1, channel=2)
            p2p.isend((torch.ones(3), None), 1)
        elif p2p.stage == 1:
            p2p.recv(0)
        if p2p.stage == 1:
            sent = r"stage 0 \(global rank 0\) sent "
            what = rf"{sent}\(float32 \(3,\), None\); {sent}float32 \(400000,\), channel 2$"
            with pytest.raises(CommunicationError, match=rf"{HERE}: close: 2 values were sent .*: {what}"):
                p2p.close()
        else:
            p2p.close()

    several(body)


def test_closing_fails_what_waits_for_nothing(several: Ranks) -> None:
    def body() -> None:
        p2p = pipe()
        text = r"irecv from stage \d .*: stage \d .*has closed its pipe and sends no more values"
        if p2p.stage == 0:
            request = p2p.irecv(1)
            with pytest.raises(CommunicationError, match=text):
                p2p.close()
            with pytest.raises(CommunicationError, match=text):
                request.wait()
        elif p2p.stage == 1:
            p2p.close()
        else:
            request = p2p.irecv(1)
            with pytest.raises(CommunicationError, match=text):
                request.wait()
            with pytest.raises(
                CommunicationError,
                match=r"send of .*: stage 1 .*has closed its pipe",
            ):
                p2p.send(torch.ones(2), 1)
            with pytest.raises(CommunicationError, match=r"recv from stage 1 .*sends no more values"):
                p2p.recv(1)
            p2p.close()

    several(body)


def test_after_an_error_no_rank_is_waited_for(several: Ranks) -> None:
    def body() -> None:
        p2p = pipe()
        with pytest.raises(ValueError, match="the program's own"), p2p:
            raise ValueError("the program's own")
        p2p.close()

    several(body)


def test_no_other_rank_closes() -> None:
    def body() -> None:
        p2p = pipe(timeout=SHORT)
        if p2p.stage == 0:
            with pytest.raises(Timeout, match=r"close: stage 1 .*, stage 2 .* did not complete within 0.3 s"):
                p2p.close()
        mpicoll.barrier()

    run_local(body, 3)


# Stages that are gone; only threads can be


def test_a_killed_stage_is_named() -> None:
    seen: list[tuple[str, str]] = []

    def body() -> None:
        p2p = pipe(timeout=30)
        if p2p.stage == 1:
            p2p.isend(torch.ones(2), 0)  # the fault ends this one
        wait: dict[int, Callable[[], Any]] = {
            0: lambda: p2p.recv(torch.zeros(2), 1),
            2: lambda: p2p.send(torch.ones(3), 1),
            3: lambda: p2p.irecv(1, channel=3).wait(),
        }
        with pytest.raises(RankFailed) as caught:
            wait[p2p.stage]()
        assert caught.value.ranks == (1,)
        seen.append((f"stage {p2p.stage}", str(caught.value)))
        if p2p.stage == 0:
            with pytest.raises(MpicollError):
                p2p.close(SHORT)

    run_local(body, 4, faults=[Kill(1, messages_of_setup(4)[1])])
    texts = dict(seen)
    assert "stage 0 (global rank 0): recv from stage 1 (global rank 1): " in texts["stage 0"]
    assert "send of float32 (3,) to stage 1 (global rank 1): " in texts["stage 2"]
    assert "irecv from stage 1 (global rank 1), channel 3: " in texts["stage 3"]
    assert all("has exited" in text for text in texts.values())


def messages_of_setup(size: int) -> list[int]:
    """How many messages each rank sends to make a PipeP2P."""

    def body() -> int:
        pipe()
        transport = mpicoll.world()._core.transport
        return transport.job.faults._sent_by[transport.rank]

    return run_local(body, size, faults=[Delay(0.0)])


def test_a_stage_that_is_done_is_gone() -> None:
    def body() -> None:
        p2p = pipe(timeout=30)
        if p2p.stage == 0:
            # What it sent before is still there to be received.
            p2p.isend(torch.ones(2), 1).wait()
        else:
            assert same(p2p.recv(0), torch.ones(2))
            with pytest.raises(RankFailed, match=r"recv from stage 0 .*has exited"):
                p2p.recv(0)
            with pytest.raises(RankFailed, match=r"stage 0 .*has exited"):
                p2p.close()

    run_local(body, 2)


def test_late_messages() -> None:
    def body() -> None:
        with pipe(timeout=30) as p2p:
            if p2p.stage == 0:
                p2p.send([torch.ones(2), torch.ones(9_000)], 1)
                p2p.send_obj("x", 1)
            else:
                assert same(p2p.recv(0), [torch.ones(2), torch.ones(9_000)])
                assert p2p.recv_obj(0) == "x"

    run_local(body, 2, faults=[Delay(0.05)])


def test_threads_and_receives_end() -> None:
    before = threading.active_count()

    def body() -> int:
        for background in (False, True):
            with pipe(background=background) as p2p:
                carry_out(p2p, 5, adjacent=True)
        with pipe(send_recv=False) as p2p:
            carry_out(p2p, 5, adjacent=True)
        transport = mpicoll.world()._core.transport
        return sum(len(box.posted) + len(box.unexpected) for box in transport.job._mailboxes.values())

    assert run_local(body, 3) == [0, 0, 0]
    deadline = time.monotonic() + 20
    while threading.active_count() > before + (poller._thread is not None) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + (poller._thread is not None)


# The default of a context


def test_functions_without_a_default(some: Ranks) -> None:
    def body() -> None:
        calls: dict[str, Callable[[], Any]] = {
            "can_send_recv": module.can_send_recv,
            "send": lambda: module.send(torch.ones(2), 1),
            "recv": lambda: module.recv(torch.ones(2), 1),
            "isend": lambda: module.isend(torch.ones(2), 1),
            "irecv": lambda: module.irecv(1),
            "send_obj": lambda: module.send_obj(3, 1),
            "recv_obj": lambda: module.recv_obj(1),
            "wait": module.wait,
        }
        for name, call in calls.items():
            with pytest.raises(CommunicatorError, match=rf"^{name}: call .*init_process_groups\(grid\) first"):
                call()

    in_new_context(some, body)


def in_new_context(ranks: Ranks, body: Callable[[], None]) -> None:
    """Run `body` where no default was set, as a new thread is."""
    if ranks.local:
        ranks(body)
        return
    world = mpicoll.world()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            assert mpicoll.world() is world
            body()
        except BaseException as error:  # noqa: BLE001  for the main thread to raise
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


class Grid:
    """Pipelines of every other rank, the last rank being the first stage."""

    def __init__(self) -> None:
        world = mpicoll.world()
        self.asked: list[tuple[str, ...]] = []
        comm = world.split(world.rank % 2, -world.rank)
        assert comm is not None
        self.comm = comm

    def communicator(self, *axes: str) -> mpicoll.Communicator:
        self.asked.append(axes)
        return self.comm


@ways
def test_functions_of_the_module(several: Ranks, send_recv: bool) -> None:
    def body() -> None:
        grid = Grid()
        p2p = init_process_groups(grid, send_recv=send_recv, timeout=20)
        assert grid.asked == [("pipe",)]
        assert module.can_send_recv() is send_recv
        world, size = mpicoll.world(), grid.comm.size
        own = list(range(world.size))[world.rank % 2 :: 2][::-1]
        assert repr(p2p) == f"<PipeP2P: stage {grid.comm.rank} (global rank {own[grid.comm.rank]}) of {size}>"
        if size > 1:
            stage = p2p.stage
            if stage == 0:
                module.send(torch.ones(2, 3), 1)
                module.send_obj({"a": 1}, 1)
                module.isend(torch.zeros(2), 1, channel=3)
                module.wait()
                assert same(module.recv(1), (torch.ones(1),))
            elif stage == 1:
                into = torch.zeros(2, 3)
                module.recv(into, 0)
                assert same(into, torch.ones(2, 3))
                assert module.recv_obj(0) == {"a": 1}
                assert same(module.irecv(0, channel=3).wait(), torch.zeros(2))
                module.send((torch.ones(1),), 0)
        p2p.close()
        with pytest.raises(CommunicatorError, match="closed"):
            module.wait()
        grid.comm.free()

    in_new_context(several, body)


def test_the_grid_in_use_is_the_default(several: Ranks) -> None:
    def body() -> None:
        from mpicoll.parallel.groups import use

        grid = Grid()
        with use(grid), PipeP2P(timeout=20) as p2p:
            assert (p2p.stage, p2p.stages) == (grid.comm.rank, grid.comm.size)
        grid.comm.free()

    several(body)


def test_random_values_are_what_they_say() -> None:
    """The oracle of these tests: the same seed gives the same value, other seeds others."""
    assert same(value(random.Random(3)), value(random.Random(3)))
    assert not same(tensor(random.Random(3), (2, 3)), tensor(random.Random(4), (2, 3)))
