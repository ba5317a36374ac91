"""Messages that are not what their receivers expect, and those that nobody receives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core import message_check
from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite

HERE = Path(__file__).name


def _ring() -> tuple[int, int, int, int]:
    world = mpicoll.world()
    return world.rank, world.size, (world.rank + 1) % world.size, (world.rank - 1) % world.size


RECEIVES: dict[str, Callable[[Any, int], Any]] = {
    "recv": lambda like, source: mpicoll.recv(like, source, 3),
    "recv from any": lambda like, source: mpicoll.recv(like),
    "recv into out": lambda like, source: mpicoll.recv(out=like, source=source),
    "irecv": lambda like, source: mpicoll.irecv(like, source, 3).wait(),
    "irecv from any": lambda like, source: mpicoll.irecv(like).wait(),
    "waitall": lambda like, source: mpicoll.waitall([mpicoll.irecv(like, source)])[0],
}


@pytest.mark.parametrize("receive", RECEIVES)
@pytest.mark.parametrize(
    ("sent", "expected", "fields", "kind"),
    [
        ("float32[4]", "int32[4]", "dtype", mpicoll.MismatchError),
        ("float32[2, 3]", "float32[3, 2]", "shape", mpicoll.MismatchError),
        ("float64[2]", "complex128[]", "dtype", mpicoll.MismatchError),
        ("float32[8]", "float32[4]", "size", mpicoll.TruncationError),
        ("float32[4]", "float32[8]", "size", mpicoll.TruncationError),
        ("float32[0]", "float32[1]", "size", mpicoll.TruncationError),
        ("float64[40000]", "float32[2]", "size and dtype", mpicoll.TruncationError),
        ("int32[6]", "float32[2, 3]", "dtype", mpicoll.MismatchError),
    ],
)
def test_another_message(
    several: Ranks, receive: str, sent: str, expected: str, fields: str, kind: type[Exception]
) -> None:
    """The receiver is told, with both calls; the message has been taken, and the next one is all right."""

    def array(text: str) -> np.ndarray[Any, Any]:
        dtype, _, shape = text.rstrip("]").partition("[")
        return np.ones([int(n) for n in shape.split(",") if n], dtype)

    def body() -> None:
        rank, size, right, left = _ring()
        with mpicoll.debug():
            request = mpicoll.isend(array(sent), right, 3)
            with pytest.raises(kind) as caught:
                RECEIVES[receive](array(expected), left)
            first, by, here = str(caught.value).splitlines()
            assert first.startswith(f"rank {rank} of {size} (world): the message")
            if "any" not in receive and sent != "float64[40000]":
                assert f"from rank {left}, tag 3, does not match the receive" in first
            assert first.endswith(f": they differ in {fields}")
            assert by.startswith(f"  it was sent by isend({sent}, peer={rank}, tag=3) at ")
            assert here.startswith("  and is received by ")
            assert f"recv({expected}" in here
            assert f"{HERE}:" in by
            assert f"{HERE}:" in here
            assert by.endswith(" in body")
            if isinstance(caught.value, mpicoll.MismatchError):
                sender, receiver = caught.value.calls
                assert sender is not None
                assert receiver is not None
                assert (sender["dtype"], receiver["dtype"]) == (sent.partition("[")[0], expected.partition("[")[0])
                assert caught.value.ranks == (left,)
            request.wait()
            assert mpicoll.sendrecv(rank, right, left) == left
            mpicoll.barrier()

    several(body)


def test_sendrecv_that_differs(several: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        with mpicoll.debug():
            with pytest.raises(mpicoll.MismatchError, match="they differ in dtype") as caught:
                mpicoll.sendrecv(np.ones(2, np.int64), right, left, like=np.ones(2))
            assert f"it was sent by sendrecv(int64[2], peer={rank}, tag=0) at" in str(caught.value)
            with pytest.raises(mpicoll.TruncationError):
                mpicoll.sendrecv(np.ones(2), right, left, like=np.ones(1))
            assert mpicoll.sendrecv(rank, right, left) == left

    several(body)


@pytest.mark.parametrize("count", [0, 1, 63, 4097, 300_000])
def test_right_messages(several: Ranks, count: int) -> None:
    """All forms, strided and flat arrays, torch's and numpy's; sizes are those of the data."""

    def body() -> None:
        rank, _, right, left = _ring()
        with mpicoll.debug():
            mine, theirs = (np.arange(count, dtype=np.float32) + one for one in (rank, left))
            np.testing.assert_array_equal(mpicoll.sendrecv(mine, right, left), theirs)
            status = mpicoll.Status()
            request = mpicoll.isend(np.repeat(mine, 2)[::2], right, 7)
            assert mpicoll.probe(left, 7).nbytes == 4 * count
            assert mpicoll.iprobe(left, 7) == mpicoll.Status(left, 7, 4 * count)
            out = np.zeros((count, 3), np.float32)
            assert mpicoll.recv(out=out[:, 1], status=status) is not None
            assert (status.source, status.tag, status.nbytes) == (left, 7, 4 * count)
            np.testing.assert_array_equal(out, np.stack([0 * theirs, theirs, 0 * theirs], 1))
            request.wait()
            requests = [mpicoll.isend(torch.tensor(mine), right), mpicoll.irecv(torch.empty(count), left)]
            assert torch.equal(requests[1].wait(), torch.tensor(theirs))
            requests[0].wait()
            # What arrives in another library, or flat, is the same.
            requests = [mpicoll.isend(mine.reshape(1, count), right), mpicoll.irecv(torch.empty(count), left)]
            assert torch.equal(requests[1].wait(), torch.tensor(theirs))
            requests[0].wait()

    several(body)


def test_order_and_tags(several: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        with mpicoll.debug():
            sending = [mpicoll.isend(np.full(number + 1, 10 * rank + number), right, number % 2) for number in range(8)]
            receiving = [mpicoll.irecv(np.empty(number + 1, int), left, number % 2) for number in range(8)]
            for number, request in reversed(list(enumerate(receiving))):
                assert (request.wait() == 10 * left + number).all()
            mpicoll.waitall(sending)

    several(body)


def test_to_oneself(ranks: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        with mpicoll.debug():
            request = mpicoll.irecv(np.empty(3), rank)
            mpicoll.send(np.arange(3.0), rank)
            assert request.wait().tolist() == [0, 1, 2]
            wrong = mpicoll.irecv(np.empty(3, np.int64), rank)
            mpicoll.send(np.arange(3.0), rank)
            with pytest.raises(mpicoll.MismatchError, match="they differ in dtype"):
                wrong.wait()
            with pytest.raises(mpicoll.MismatchError, match="they differ in dtype"):
                wrong.wait()  # it stays what it was

    ranks(body)


def test_messages_of_others_are_taken_as_they_are(several: Ranks) -> None:
    """Those of mpi4py, on the same communicator."""

    def body() -> None:
        world = mpicoll.world()
        if world.mpi is None:
            return
        rank, _, right, left = _ring()
        with mpicoll.debug():
            for count in (1, 1000):
                request = world.mpi.Isend(np.full(count, float(rank)), right, 4)
                np.testing.assert_array_equal(mpicoll.recv(np.empty(count), left, 4), np.full(count, float(left)))
                request.Wait()
            request = world.mpi.Isend(np.full(5, float(rank)), right, 4)
            with pytest.raises(mpicoll.TruncationError, match="a message of 40 bytes"):
                mpicoll.recv(np.empty(4), left, 4)
            request.Wait()
            small = world.mpi.Isend(np.zeros(3, np.uint8), right, 4)
            assert mpicoll.probe(left, 4).nbytes == 3
            mpicoll.recv(np.empty(3, np.uint8), left, 4)
            small.Wait()

    several(body)


def test_messages_that_a_freed_communicator_leaves(
    several: Ranks, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def body() -> None:
        world = mpicoll.world()
        part = world.split(0)
        assert part is not None
        with mpicoll.debug():
            if part.rank == 0:
                mpicoll.isend(np.ones((2, 2)), part.size - 1, 8, comm=part).wait()
            mpicoll.barrier(comm=part)
            if part.rank == part.size - 1:
                mpicoll.probe(0, 8, comm=part)
            part.free()

    several(body)
    written = capfd.readouterr().err
    if several.local or mpicoll.world().rank == mpicoll.world().size - 1:
        size = several.size
        assert written.startswith(
            f"mpicoll: warning: rank {size - 1} of {size} (world/split(0)): a message of 32 bytes from rank 0, tag 8,"
            f" was never received: isend(float64[2, 2], peer={size - 1}, tag=8) at {__file__}:"
        )
        assert written.count("\n") == 1
    else:
        assert written == ""


def test_a_run_that_leaves_messages(capfd: pytest.CaptureFixture[str]) -> None:
    def body(leave: bool) -> None:
        if mpicoll.world().rank == 0 and leave:
            mpicoll.send(np.ones(3, np.int8), 1, 2)
            mpicoll.irecv(0)

    mpicoll.run_local(body, 2, True)
    assert capfd.readouterr().err.splitlines() == [
        "mpicoll: warning: rank 0 of 2 (world): no message arrived for a receive from any rank, any tag",
        "mpicoll: warning: rank 1 of 2 (world): a message of 3 bytes from rank 0, tag 2, was never received",
    ]
    mpicoll.run_local(body, 2, False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", ["/x.py", "/" + "long/" * 300 + "x.py", "/ü" * 2000 + "/x.py"])
def test_notes_have_one_length(path: str) -> None:
    call = Call("send", 24, "float64", (3,), peer=1, tag=2, collective=False)
    about = message_check.make_header(call, CallSite(path, 7, "main"))
    whole = message_check.add_header(np.arange(24, dtype=np.uint8), about)
    assert whole.size == message_check.LENGTH + 24
    found = message_check.header_of(whole)
    assert found is not None
    assert (found["dtype"], found["shape"], found["nbytes"]) == ("float64", [3], 24)
    assert found["site"].endswith("x.py:7 in main")
    assert found["text"] == "send(float64[3], peer=1, tag=2)"
    np.testing.assert_array_equal(whole[message_check.LENGTH :], np.arange(24))
    assert message_check.header_of(whole[: message_check.LENGTH - 1]) is None
    assert message_check.header_of(whole[1:]) is None


def test_notes_of_many_dimensions() -> None:
    call = Call("send", 8, "float64", (1,) * 64, peer=1, tag=2, collective=False)
    found = message_check.header_of(
        message_check.add_header(
            np.zeros(8, np.uint8), message_check.make_header(call, CallSite("/y" * 300, 7, "f" * 400))
        )
    )
    assert found is not None
    assert (found["dtype"], found["nbytes"]) == ("float64", 8)
