"""Values like the previous one of their line, which the extension passes where the ranks are those of an MPI job."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks
from support.stage_values import same

import mpicoll
from mpicoll.errors import CommunicationError, CommunicatorError, Timeout
from mpicoll.parallel.p2p import PipeP2P
from mpicoll.parallel.p2p.channels import PLAIN
from mpicoll.parallel.p2p.repeated_values import NOT_PASSED

TURNS = 4

LATE = 0.01
"""Seconds after which the extension has left an exchange to Python."""


def pipe(**options: Any) -> PipeP2P:
    return PipeP2P(mpicoll.world(), **{"timeout": 20.0, **options})


def bounce(p2p: PipeP2P, value: torch.Tensor, into: torch.Tensor | None = None, channel: int = 0) -> Any:
    """Send a value from stage 0 to stage 1 and back, and return what comes here."""
    first, other = p2p.stage == 0, 1 - p2p.stage
    if first:
        p2p.send(value, other, channel=channel)
    received = p2p.recv(other, channel=channel) if into is None else p2p.recv(into, other, channel=channel)
    if not first:
        p2p.send(value, other, channel=channel)
    return received


def exchange(p2p: PipeP2P, *, sends: bool) -> bool:
    """Send or receive a value, and return True if the extension has passed it."""
    value, other = torch.ones(3), 1 - p2p.stage
    if sends:
        passed = p2p._repeated.exchange("send", 0, other, PLAIN, value, None, PLAIN) is not NOT_PASSED
        if not passed:
            p2p.send(value, other)
        return passed
    got = p2p._repeated.exchange("recv", 0, None, PLAIN, None, other, PLAIN)
    assert same(p2p.recv(other) if got is NOT_PASSED else got, value)
    return got is not NOT_PASSED


@pytest.mark.mpi
@pytest.mark.extension
def test_the_extension_passes_them() -> None:
    comm = mpicoll.world()
    if comm.size < 2:
        pytest.skip("needs two ranks")
    with pipe() as p2p:
        if p2p.stage < 2:
            # On a busy machine a peer may be too late for the extension.
            passed = [(exchange(p2p, sends=p2p.stage == 0), exchange(p2p, sends=p2p.stage == 1)) for _ in range(200)]
            assert passed[0] == (False, False)
            assert all(map(any, zip(*passed, strict=True)))


def test_what_may_change_from_value_to_value(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            for turn in range(3):
                for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
                    for shape in ((), (0,), (3,), (2, 3), (20_001,)):
                        for repeat in range(TURNS):
                            value = torch.full(shape, turn + repeat).to(dtype)
                            into = torch.zeros(shape, dtype=dtype) if repeat % 2 else None
                            got = bounce(p2p, value, into)
                            assert same(got, value)
                            assert into is None or got is into
            for repeat in range(3 * TURNS):
                expect = [None, (2, 3), torch.empty(2, 3)][repeat % 3]
                if p2p.stage == repeat % 2:
                    p2p.send(torch.full((2, 3), float(repeat)), 1 - p2p.stage)
                else:
                    assert same(p2p.recv(1 - p2p.stage, expect=expect), torch.full((2, 3), float(repeat)))
            for repeat in range(3 * TURNS):
                # The header says whether it requires grad, and a value of another layout in memory is copied.
                value = torch.full((4, 3), float(repeat)).t() if repeat % 3 else torch.full((3, 4), float(repeat))
                value.requires_grad_(repeat % 4 == 3)
                got = bounce(p2p, value, channel=repeat % 2)
                assert same(got.detach(), value.detach())
                assert got.requires_grad is value.requires_grad
            for repeat in range(2 * TURNS):
                value = [None, (torch.ones(2), repeat), torch.nn.Parameter(torch.ones(2)), torch.ones(2)][repeat % 4]
                got = bounce(p2p, value)
                assert same(got, value if not isinstance(value, torch.nn.Parameter) else got)

    several(body)


LARGE = 9_000
"""Elements of a tensor that is a message of its own."""


@pytest.mark.mpi
@pytest.mark.extension
@pytest.mark.parametrize(("count", "size"), [(1, LARGE), (3, LARGE), (8, 2)])
def test_the_extension_passes_structured_values(count: int, size: int) -> None:
    comm = mpicoll.world()
    if comm.size < 2:
        pytest.skip("needs two ranks")
    with pipe() as p2p:
        if p2p.stage < 2:
            other, passed, sent = 1 - p2p.stage, [], []
            for turn in range(100):
                value = (0, "train", [torch.full((size + part,), float(turn)) for part in range(count)])
                if p2p.stage == 0:
                    started = p2p._repeated.start("isend", 0, other, value)
                    sent.append(started is not None)
                    if started is None:
                        p2p.isend(value, other)
                    p2p.recv(other, channel=1)
                    p2p.wait()
                else:
                    got = p2p._repeated.receive("recv", 0, other)
                    passed.append(got is not NOT_PASSED)
                    assert same(p2p.recv(other) if got is NOT_PASSED else got, value)
                    p2p.send(torch.ones(1), other, channel=1)
            assert sent[1:] == [True] * 99 if p2p.stage == 0 else any(passed)


def test_structured_values(several: Ranks) -> None:
    """What changes from value to value: the plain values, shapes, dtypes, the structure, and how they are sent."""

    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return

            def make(turn: int) -> Any:
                large, other = torch.full((LARGE,), float(turn)), torch.full((3, LARGE), -float(turn))
                odd = turn % 3 == 2
                return [
                    (0, "one", large),
                    (turn % 2, "two", large),
                    (0, large, other),
                    [large, [other, (large.double() if odd else large, None)]],
                    (large, other.t() if odd else other.t().contiguous().t()),
                    (large, torch.full((LARGE - turn % 2,), 1.0)),
                    (large, other.requires_grad_(odd)),
                    (large, torch.full((3,), float(turn))),
                    (torch.full((3,), 1.0), torch.full((4,), float(turn)), large),
                    {"a": large, "b": turn},
                    (torch.empty(0), large),
                    (*torch.full((9, 2), float(turn)), large),
                ][kind]

            for kind in range(12):
                for turn in range(2 * TURNS):
                    other, value = 1 - p2p.stage, make(turn)
                    if turn % 4 == 3 and p2p.stage == kind % 2:
                        time.sleep(LATE)
                    if p2p.stage == turn % 2:
                        # Blocking sends are acknowledged.
                        send = p2p.send if turn % 4 > 1 else p2p.isend
                        send(value, other, channel=kind % 2)
                    else:
                        assert same(p2p.recv(other, channel=kind % 2), value)
                    p2p.wait()

    several(body)


def test_a_structured_value_where_a_tensor_is_expected(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            value = (0, torch.ones(LARGE))
            for turn in range(TURNS):
                if p2p.stage == 0:
                    p2p.isend(value, 1)
                    with pytest.raises(CommunicationError, match=r"expected a tensor|expected float32"):
                        p2p.send(value, 1)
                else:
                    assert same(p2p.recv(0), value)
                    with pytest.raises(CommunicationError, match=r"sent \(0, float32"):
                        p2p.recv(torch.empty(LARGE), 0) if turn % 2 else p2p.recv(0, expect=(LARGE,))

    several(body)


def test_many_values_before_a_receive(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            for turn in range(3):
                if p2p.stage == 0:
                    for number in range(10):
                        p2p.isend((number % 2, torch.full((LARGE,), float(number)), torch.full((LARGE,), turn)), 1)
                    p2p.wait()
                else:
                    time.sleep(LATE)
                    for number in range(10):
                        want = (number % 2, torch.full((LARGE,), float(number)), torch.full((LARGE,), turn))
                        assert same(p2p.recv(0) if number % 3 else p2p.irecv(0).wait(), want)

    several(body)


def test_a_filled_tensor_has_a_new_version(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            into = torch.zeros(5)
            for _ in range(TURNS):
                version = into._version
                bounce(p2p, torch.ones(5), into)
                assert into._version > version
            with torch.inference_mode():
                into = torch.zeros(5)
                for _ in range(TURNS):
                    assert bounce(p2p, torch.ones(5), into) is into

    several(body)


@pytest.mark.parametrize("size", [3, 300_000])
def test_one_stage_is_late(several: Ranks, size: int) -> None:
    """Longer than the extension waits: Python goes on with what has been sent, or expected."""

    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            for turn in range(3 * TURNS):
                if turn % 3 == p2p.stage:
                    time.sleep(LATE)
                into = torch.zeros(size) if turn % 2 else None
                assert same(bounce(p2p, torch.full((size,), float(turn)), into), torch.full((size,), float(turn)))

    several(body)


def test_other_messages_come_first(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            other = 1 - p2p.stage
            for _ in range(TURNS):
                for channel in range(3):
                    bounce(p2p, torch.ones(4), channel=channel)
            for turn in range(TURNS):
                if p2p.stage == 0:
                    requests = [p2p.isend(torch.full((4,), float(turn)), other, channel=one) for one in (1, 0, 2)]
                    p2p.send(torch.full((4,), -1.0), other)
                    for request in requests:
                        request.wait()
                else:
                    waiting = p2p.irecv(other, channel=2)
                    assert p2p.recv(other)[0] == turn
                    assert p2p.recv(other)[0] == -1
                    assert waiting.wait()[0] == turn
                    assert p2p.recv(other, channel=1)[0] == turn
                assert p2p.poll() == 0

    several(body)


def test_values_in_both_directions_at_once(several: Ranks) -> None:
    """In a ring, where a stage waits for the acknowledgement of one stage and a value of the other; or the same one."""

    def body() -> None:
        with pipe() as p2p:
            before = (p2p.stage - 1) % p2p.stages
            last = p2p.stages - 1
            for turn in range(3 * TURNS):
                if turn % 4 == 3 and p2p.stage == turn % p2p.stages:
                    time.sleep(LATE)
                got = p2p.send_forward_recv_forward(torch.full((5,), 10.0 * p2p.stage + turn), ring=True)
                assert same(got, torch.full((5,), 10.0 * before + turn))
                got = p2p.send_backward_recv_backward(torch.full((5,), p2p.stage + turn), (5,), ring=True)
                assert same(got, torch.full((5,), (p2p.stage + 1) % p2p.stages + turn))
                # One forward, one backward between the first two stages.
                if p2p.stage == 0 and last:
                    assert same(p2p.send_forward_recv_backward(torch.full((2,), float(turn))), torch.full((2,), -1.0))
                elif p2p.stage == 1:
                    assert same(p2p.recv_forward(torch.empty(2)), torch.full((2,), float(turn)))
                    p2p.send_backward(torch.full((2,), -1.0))

    several(body)


def test_errors_after_values_that_were_right(several: Ranks) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage > 1:
                return
            other = 1 - p2p.stage
            for _ in range(2):
                for _ in range(TURNS):
                    assert same(bounce(p2p, torch.ones(4)), torch.ones(4))
                if p2p.stage == 0:
                    with pytest.raises(CommunicationError, match=r"float32 \(4,\).* expected torch|expected float"):
                        p2p.send(torch.ones(4), other)
                    with pytest.raises(CommunicationError, match=r"expected a tensor of shape \(3,\)"):
                        p2p.send(torch.ones(4), other)
                else:
                    with pytest.raises(CommunicationError, match=r"sent float32 \(4,\), but"):
                        p2p.recv(torch.ones(4, dtype=torch.float64), other)
                    with pytest.raises(CommunicationError, match=r"expected a tensor of shape \(3,\)"):
                        p2p.recv(other, expect=(3,))
                for _ in range(TURNS):
                    assert same(bounce(p2p, torch.ones(4)), torch.ones(4))

    several(body)


@pytest.mark.parametrize("size", [3, 300_000])
def test_no_stage_receives_in_time(several: Ranks, size: int) -> None:
    def body() -> None:
        with pipe() as p2p:
            if p2p.stage < 2:
                for _ in range(TURNS):
                    bounce(p2p, torch.ones(size))
                if p2p.stage == 0:
                    p2p.timeout = 0.1
                    with pytest.raises(Timeout, match=r"send of float32 .* not received within 0\.1 s; the send"):
                        p2p.send(torch.full((size,), 2.0), 1)
                    with pytest.raises(Timeout, match=r"recv from stage 1 .* received nothing within 0\.1 s"):
                        p2p.recv(torch.empty(size), 1)
                    p2p.timeout = 20
            mpicoll.barrier()
            if p2p.stage < 2:
                if p2p.stage == 1:
                    assert p2p.recv(0)[0] == 2
                for _ in range(TURNS):
                    assert same(bounce(p2p, torch.ones(size)), torch.ones(size))

    several(body)


def test_messages_are_counted(several: Ranks) -> None:
    def body() -> None:
        p2p = pipe()
        traffic = p2p._wire.comm._core.transport.traffic  # type: ignore[union-attr]
        for turn in range(2 * TURNS):
            p2p.send_forward_recv_forward(torch.full((5,), float(turn)), ring=True)
            if p2p.stage < 2:
                bounce(p2p, torch.ones(4))
        if traffic is not None:
            for tags in (lambda tag: tag & 7 == 5, lambda tag: tag & 7 != 5):
                sent, received = (
                    np.array([sum(n for (peer, tag), n in tally.items() if peer == one and tags(tag)) for one in peers])
                    for tally in (traffic.sent, traffic.received)
                    for peers in [range(p2p.stages)]
                )
                assert np.array_equal(mpicoll.alltoall(sent), received)
                assert sent.sum() >= 2 * TURNS
        p2p.close()
        with pytest.raises(CommunicatorError, match="closed"):
            p2p.send(torch.ones(5), (p2p.stage + 1) % p2p.stages)
        with pytest.raises(CommunicatorError, match="closed"):
            p2p.send_forward(torch.ones(5), ring=True)

    several(body)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_exchanges(several: Ranks, seed: int) -> None:
    """All stages in a ring, with delays, of a few kinds of values, by all forms."""

    def body() -> None:
        with pipe() as p2p:
            plan, delays = random.Random(seed), random.Random(seed + 10 * p2p.stage)
            before, after = (p2p.stage - 1) % p2p.stages, (p2p.stage + 1) % p2p.stages
            for number in range(60):
                size, form, channel = plan.choice([2, 3000, 40_000]), plan.randrange(4), plan.randrange(2)
                value = torch.full((size,), 100.0 * p2p.stage + number)
                wanted = torch.full((size,), 100.0 * before + number)
                if delays.random() < 0.2:
                    time.sleep(delays.choice([0.0, 0.0003, 0.002]))
                if form == 0:
                    got = p2p.send_forward_recv_forward(value, channel=channel, ring=True)
                elif form == 1:
                    request = p2p.isend(value, after, channel=channel)
                    got = p2p.recv(torch.empty(size), before, channel=channel)
                    request.wait()
                elif form == 2:
                    pending = p2p.irecv(before, channel=channel)
                    p2p.send(value, after, channel=channel)
                    got = pending.wait()
                else:
                    pending = p2p.irecv(before, channel=channel)
                    request = p2p.isend(value, after, channel=channel)
                    got = pending.wait()
                    request.wait()
                assert same(got, wanted)

    several(body)
