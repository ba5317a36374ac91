"""Messages from device memory to device memory: matched as all others, and copied by the receiver. On the fake CUDA."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import device_bodies as bodies
from support import fake_cuda
from support.cuda_calls import count_announcements, count_cuda_calls
from support.device_bodies import Cupy
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll
from mpicoll.collectives.repeated_messages import StartedMessage
from mpicoll.engine.executors import peer_messages
from mpicoll.engine.executors.staging import ANNOUNCEMENT_BYTES, MIN_ANNOUNCED_BYTES

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.extension]

COUNT = 3 * MIN_ANNOUNCED_BYTES // 4
"""Elements of 4 bytes of a message that is announced."""


@pytest.fixture
def arrays(cuda: ModuleType) -> Iterator[Cupy]:
    if not fake_cuda.is_fake(cuda):
        pytest.skip("of the fake CUDA; tests/gpu has the real one")
    _forget()
    made = Cupy(cuda, played=True)
    yield made
    made.forget()
    _forget()


def _forget() -> None:
    """MPI's world outlives the fake device of a test."""
    core = mpicoll.world()._core
    core.devices = None
    core.registry.peer_messages = ()
    core.discard_calls()


def connect(arrays: Any) -> peer_messages.PeerMessages:
    """Let the ranks open each other's memory, as the first collective on the device does."""
    mpicoll.allreduce(arrays.put(np.ones(1)))
    (found,) = mpicoll.world()._core.registry.peer_messages
    assert isinstance(found, peer_messages.PeerMessages)
    return found


def neighbours() -> tuple[int, int, int]:
    world = mpicoll.world()
    return world.rank, (world.rank + 1) % world.size, (world.rank - 1) % world.size


def values(rank: int, turn: int = 0, count: int = COUNT) -> np.ndarray:
    return np.arange(count, dtype=np.float32) + 1000 * rank + turn


@pytest.fixture
def announcements(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many messages are announced, and for how many there is no memory."""
    return count_announcements(monkeypatch)


BODIES: tuple[Callable[[Any], None], ...] = (
    bodies.messages_of_every_size,
    bodies.messages_between_host_and_device,
    bodies.messages_are_in_order,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bodies(several: Ranks, arrays: Cupy, body: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds for all messages holds for these, which are all that are large enough to hold their announcement."""
    monkeypatch.setattr("mpicoll.collectives.message_buffers.MIN_ANNOUNCED_BYTES", ANNOUNCEMENT_BYTES + 1)

    several(bodies.after_a_collective, arrays, body)


def test_each_way_to_receive(several: Ranks, arrays: Cupy, announcements: Counter[bool]) -> None:
    """Blocking and not, into memory of the device and of the host, of any layout, more often than memory is there."""

    def main() -> None:
        connect(arrays)
        rank, right, left = neighbours()
        for turn in range(12):
            x, want = arrays.put(values(rank, turn)), values(left, turn)
            for into, read in ((arrays.put, arrays.get), (np.array, np.array)):
                out, status = into(np.zeros(COUNT, np.float32)), mpicoll.Status()
                receiving = mpicoll.irecv(source=left, tag=turn, out=out, status=status)
                mpicoll.send(x, right, turn)
                assert receiving.wait() is out
                np.testing.assert_array_equal(read(out), want)
                assert (status.source, status.tag, status.nbytes) == (left, turn, 4 * COUNT)
                got = mpicoll.sendrecv(x, right, left, like=into(np.zeros(COUNT, np.float32)))
                np.testing.assert_array_equal(read(got), want)
            strided = arrays.put(np.zeros((COUNT, 2), np.float32))
            sending = mpicoll.isend(arrays.put(np.repeat(values(rank, turn), 2))[::2], right, 99)
            mpicoll.recv(source=left, tag=99, out=strided[:, 1])
            np.testing.assert_array_equal(arrays.get(strided), np.stack([0 * want, want], 1))
            sending.wait()
        mpicoll.barrier()

    several(main)
    assert announcements[True]
    assert not announcements[False]


@pytest.mark.parametrize("count", [COUNT, COUNT + 1], ids=["right size", "another size"])
def test_a_receive_in_which_a_thread_is_when_the_ranks_connect(several: Ranks, arrays: Cupy, count: int) -> None:
    """The extension carries it out, and knows nothing of announcements."""

    def main() -> None:
        world, (rank, right, left) = mpicoll.world(), neighbours()
        out, raised = np.zeros(COUNT, np.float32), []
        for _ in range(3):
            sending = mpicoll.isend(values(rank), right)
            mpicoll.recv(source=left, out=out)
            sending.wait()

        def receive() -> None:
            try:
                mpicoll.recv(source=left, out=out, comm=world)
            except mpicoll.TruncationError as error:
                raised.append(str(error))

        receiver = threading.Thread(target=receive)
        receiver.start()
        watch = world._core.watch
        deadline = time.monotonic() + 1
        while watch is not None and receiver.ident not in watch.active and time.monotonic() < deadline:
            time.sleep(1e-3)
        messages = connect(arrays)
        sending = mpicoll.isend(arrays.put(values(rank, 7, count)), right)
        receiver.join(20)
        assert not receiver.is_alive()
        sending.wait()
        if count == COUNT:
            assert not raised
            np.testing.assert_array_equal(out, values(left, 7))
        else:
            assert len(raised) == 1
            assert f"{4 * count} bytes" in raised[0]
        mpicoll.barrier()
        assert messages.is_idle

    several(main)


def test_receives_that_were_posted_before_the_ranks_connect(
    several: Ranks, arrays: Cupy, announcements: Counter[bool]
) -> None:
    """The extension has started them, and knows nothing of announcements."""

    def main() -> None:
        rank, right, left = neighbours()
        out = np.zeros(COUNT, np.float32)
        for _ in range(3):
            receiving = mpicoll.irecv(source=left, out=out)
            mpicoll.send(values(rank), right)
            receiving.wait()
        outs = [np.zeros(COUNT, np.float32) for _ in range(3)]
        requests = [mpicoll.irecv(source=left, out=one) for one in outs]
        assert all((type(one._handle) is StartedMessage) is not several.local for one in requests)
        messages = connect(arrays)
        for turn in range(2):
            mpicoll.send(arrays.put(values(rank, turn)), right)
        sending = mpicoll.isend(arrays.put(values(rank, 2, COUNT + 1)), right)
        assert requests[0].wait() is outs[0]
        while not requests[1].test():
            time.sleep(1e-4)
        assert requests[1].wait() is outs[1]
        for turn in range(2):
            np.testing.assert_array_equal(outs[turn], values(left, turn))
        for _ in range(2):
            with pytest.raises(mpicoll.TruncationError, match=f"{4 * COUNT + 4} bytes"):
                requests[2].wait()
        sending.wait()
        mpicoll.barrier()
        assert messages.is_idle

    several(main)
    assert announcements[True]


def test_messages_of_several_communicators(several: Ranks, arrays: Cupy, announcements: Counter[bool]) -> None:
    """All pass through what the world has made, also those of a communicator that has used no device."""

    def main() -> None:
        messages = connect(arrays)
        rank, right, left = neighbours()
        world = mpicoll.world()
        other, reversed_ = world.duplicate(), world.group(range(world.size)[::-1])
        assert reversed_ is not None
        for turn in range(4):
            x = arrays.put(values(rank, turn))
            requests = [mpicoll.isend(x, right, 5, comm=world), mpicoll.isend(x, right, 5, comm=other)]
            requests.append(mpicoll.isend(x, world.size - 1 - right, 5, comm=reversed_))
            for comm, source in ((reversed_, world.size - 1 - left), (other, left), (world, left)):
                got = mpicoll.recv(x, source, 5, comm=comm)
                np.testing.assert_array_equal(arrays.get(got), values(left, turn))
            mpicoll.waitall(requests)
        mpicoll.barrier()
        assert mpicoll.allreduce(arrays.put(np.ones(1)), comm=other) is not None
        assert world._core.registry.peer_messages == (messages,)
        mpicoll.barrier()

    several(main)
    assert announcements[True]


def test_the_communicator_that_connected_the_ranks_is_freed(
    several: Ranks, arrays: Cupy, announcements: Counter[bool]
) -> None:
    """Messages of the others still pass, and a sender can wait for their receivers."""

    def main() -> None:
        rank, right, left = neighbours()
        with mpicoll.world().duplicate() as comm:
            mpicoll.allreduce(arrays.put(np.ones(1)), comm=comm)
        (messages,) = mpicoll.world()._core.registry.peer_messages
        assert isinstance(messages, peer_messages.PeerMessages)
        request = mpicoll.isend(arrays.put(values(rank)), right)
        mpicoll.barrier()
        assert not messages.drain(0.05)
        mpicoll.barrier()
        got = mpicoll.recv(arrays.put(values(rank)), left)
        np.testing.assert_array_equal(arrays.get(got), values(left))
        request.wait()
        assert messages.drain(30)
        mpicoll.barrier()

    several(main)
    assert announcements[True]


def test_a_communicator_on_other_devices(
    cuda: ModuleType, arrays: Cupy, announcements: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some ranks use the device that they have used before, and others do not, all connect anew."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")

    def main() -> None:
        world = mpicoll.world()
        connect(arrays)
        with cuda.cuda.Device(world.rank), world.duplicate() as comm:
            mpicoll.allreduce(arrays.put(np.ones(1)), comm=comm)
            assert len(world._core.registry.peer_messages) == 2
            x = arrays.put(values(world.rank))
            got = mpicoll.sendrecv(x, 1 - world.rank, comm=comm)
            np.testing.assert_array_equal(arrays.get(got), values(1 - world.rank))
            mpicoll.barrier()

    mpicoll.run_local(main, 2, timeout=60)
    assert announcements[True]


def test_messages_to_another_device_of_the_receiver(
    cuda: ModuleType, arrays: Cupy, announcements: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of that device can't read what was opened for another one: what a kernel fills is fetched by a copy."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    monkeypatch.setattr(fake_cuda.fakecuda.memory, "peers", set())

    def main() -> None:
        rank, other, _ = neighbours()
        connect(arrays)
        request = mpicoll.isend(arrays.put(values(rank)), other)
        with cuda.cuda.Device(1):
            out = arrays.put(np.zeros((8, 2, COUNT // 8), np.float32))
            place = out[:, 1].T
            mpicoll.recv(source=other, out=place)
            np.testing.assert_array_equal(arrays.get(place), values(other).reshape(place.shape))
            assert not arrays.get(out)[:, 0].any()
        request.wait()
        mpicoll.barrier()

    mpicoll.run_local(main, 2, timeout=60)
    assert announcements[True]
    assert not announcements[False]


def test_probe_tells_the_size_of_the_message(several: Ranks, arrays: Cupy) -> None:
    def main() -> None:
        connect(arrays)
        rank, right, left = neighbours()
        counts = (COUNT, 100, 2 * COUNT, ANNOUNCEMENT_BYTES // 4)
        requests = [mpicoll.isend(arrays.put(values(rank, 0, count)), right, 6) for count in counts]
        for count in counts:
            status = mpicoll.probe(left)
            assert (status.source, status.tag, status.nbytes) == (left, 6, 4 * count)
            got = mpicoll.recv(arrays.put(np.zeros(count, np.float32)), left)
            np.testing.assert_array_equal(arrays.get(got), values(left, 0, count))
        mpicoll.waitall(requests)
        mpicoll.barrier()

    several(main)


def test_what_finds_no_memory_passes_through_the_host(
    several: Ranks, arrays: Cupy, announcements: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where receivers are late, and where a message is larger than all memory for them."""
    monkeypatch.setattr(peer_messages, "MAX_BYTES", 4 << 20)

    def main() -> None:
        messages = connect(arrays)
        rank, right, left = neighbours()
        for count, times in ((COUNT, 40), (2 << 20, 2), (COUNT, 3)):
            requests = [mpicoll.isend(arrays.put(values(rank, turn, count)), right, 1) for turn in range(times)]
            mpicoll.barrier()
            for turn in range(times):
                got = mpicoll.recv(arrays.put(np.zeros(count, np.float32)), left, 1)
                np.testing.assert_array_equal(arrays.get(got), values(left, turn, count))
            mpicoll.waitall(requests)
            mpicoll.barrier()
            assert messages.is_idle
        assert sum(one.memory.nbytes for one in messages._slots if one.memory is not None) <= 4 << 20

    several(main)
    assert announcements[True]
    assert announcements[False]


def test_a_device_that_is_full(arrays: Cupy, announcements: Counter[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages pass through the host until there is memory again."""

    def main() -> None:
        connect(arrays)
        rank, right, left = neighbours()
        for full in (True, False):
            mpicoll.barrier()
            if rank == 0:
                monkeypatch.setattr("mpicoll.buffers.cuda.streams.DeviceStreams.empty", refuse if full else empty)
            mpicoll.barrier()
            request = mpicoll.isend(arrays.put(values(rank)), right)
            got = mpicoll.recv(np.zeros(COUNT, np.float32), left)
            np.testing.assert_array_equal(got, values(left))
            request.wait()

    from mpicoll.buffers.cuda.streams import DeviceStreams

    empty = DeviceStreams.empty

    def refuse(*arguments: Any) -> Any:
        raise MemoryError("Out of memory allocating 262,144 bytes")

    mpicoll.run_local(main, 2, timeout=60)
    assert announcements == {False: 2, True: 2}


def test_larger_memory_takes_the_place_of_smaller(
    several: Ranks, arrays: Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What receivers have opened is closed then."""
    monkeypatch.setattr(peer_messages, "_SLOTS", 2)

    def main() -> None:
        messages = connect(arrays)
        rank, right, left = neighbours()
        for turn in range(10):
            count = COUNT << turn % 5
            request = mpicoll.isend(arrays.put(values(rank, turn, count)), right)
            got = mpicoll.recv(arrays.put(np.zeros(count, np.float32)), left)
            np.testing.assert_array_equal(arrays.get(got), values(left, turn, count))
            request.wait()
            mpicoll.barrier()
            gc.collect()
            assert len(messages._opened) <= 2
        if rank == 0 and not several.local:
            assert len(fake_cuda.fakecuda.memory._opened) <= 2 * (mpicoll.world().size - 1) + 2

    several(main)


def test_checked_messages(several: Ranks, arrays: Cupy, announcements: Counter[bool]) -> None:
    def main() -> None:
        messages = connect(arrays)
        rank, right, left = neighbours()
        with mpicoll.debug(check=True):
            request = mpicoll.isend(arrays.put(values(rank)), right)
            np.testing.assert_array_equal(arrays.get(mpicoll.recv(arrays.put(values(0)), left)), values(left))
            request.wait()
            request = mpicoll.isend(arrays.put(values(rank)), right)
            with pytest.raises(mpicoll.MismatchError, match=r"float32\[49152\] on cuda"):
                mpicoll.recv(arrays.put(np.zeros(COUNT, np.int32)), left)
            request.wait()
        mpicoll.barrier()
        assert messages.is_idle

    several(main)
    assert announcements[True]


def test_a_message_of_another_size(several: Ranks, arrays: Cupy) -> None:
    """The error names the size of the message, not that of its announcement, and its memory is free again."""

    def main() -> None:
        messages = connect(arrays)
        rank, right, left = neighbours()
        for count in (COUNT - 1, COUNT + 1):
            request = mpicoll.isend(arrays.put(values(rank)), right)
            with pytest.raises(mpicoll.TruncationError, match=f"{4 * COUNT} bytes"):
                mpicoll.recv(arrays.put(np.zeros(count, np.float32)), left)
            request.wait()
        mpicoll.barrier()
        assert messages.is_idle

    several(main)


def test_memory_that_can_not_be_opened(arrays: Cupy) -> None:
    """The receiver raises an error that names both ranks; the memory is free again, and later messages arrive."""

    def main() -> None:
        messages = connect(arrays)
        world = mpicoll.world()
        if world.rank == 0:
            mpicoll.send(arrays.put(values(0)), 1)
            mpicoll.send(arrays.put(values(0, 1)), 1)
            mpicoll.barrier()
            assert messages.is_idle
            return
        device = messages.device

        class Refusing:
            def __getattr__(self, name: str) -> Any:
                return getattr(device, name)

            def reach(self, export: Any) -> Any:
                raise mpicoll.DeviceError("no such memory")

        messages.device = Refusing()
        with pytest.raises(
            mpicoll.DeviceError, match=r"rank 1 of 2 \(of this node\): the message of rank 0 can't be read: no such"
        ):
            mpicoll.recv(arrays.put(values(9)), 0)
        messages.device = device
        np.testing.assert_array_equal(arrays.get(mpicoll.recv(arrays.put(values(9)), 0)), values(0, 1))
        mpicoll.barrier()

    mpicoll.run_local(main, 2, timeout=60)


def test_ranks_that_share_a_device_announce_large_messages_only(
    several: Ranks, arrays: Cupy, announcements: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_messages, "MIN_SHARED_BYTES", 4 * COUNT + 1)

    def main() -> None:
        connect(arrays)
        rank, right, left = neighbours()
        for count in (COUNT, COUNT + 1):
            got = mpicoll.sendrecv(arrays.put(values(rank, count=count)), right, left)
            np.testing.assert_array_equal(arrays.get(got), values(left, count=count))
            mpicoll.barrier()

    several(main)
    # Ranks that are threads count together.
    assert announcements[True] in (1, several.size if several.local else 1), announcements
    assert not announcements[False]


def test_explain_tells_the_way_of_a_message(arrays: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        x = arrays.put(np.zeros(4, np.float32))
        other = 1 - mpicoll.world().rank

        def explain(nbytes: int = 1 << 20, **options: Any) -> str:
            return str(mpicoll.explain("send", nbytes, root=other, **options))

        assert explain().startswith("host: ")
        assert explain(like=x).startswith("staged: the ranks have not tried yet")
        connect(arrays)
        assert explain(like=x).startswith("ipc: ")
        assert explain(100, like=x).startswith("staged: it has fewer than 65536 bytes")
        assert "on this rank itself" in str(mpicoll.explain("send", 1 << 20, root=1 - other, like=x))
        mpicoll.barrier()
        monkeypatch.setattr(peer_messages, "MIN_SHARED_BYTES", 2 << 20)
        assert explain(like=x) == "staged: both ranks use one device, and it has fewer than 2097152 bytes"
        assert explain(2 << 20, like=x).startswith("ipc: ")
        mpicoll.barrier()

    mpicoll.run_local(main, 2, timeout=60)

    def apart() -> None:
        x = arrays.put(np.zeros(4, np.float32))
        mpicoll.allreduce(x)
        text = str(mpicoll.explain("send", 1 << 20, root=1 - mpicoll.world().rank, like=x))
        assert text.startswith("staged: rank 0 (of this node): memory of cuda:0 can't be opened"), text
        got = mpicoll.sendrecv(arrays.put(values(mpicoll.world().rank)), 1 - mpicoll.world().rank)
        np.testing.assert_array_equal(arrays.get(got), values(1 - mpicoll.world().rank))

    monkeypatch.setattr("mpicoll.buffers.cuda.ipc_handles.export", lambda *arguments: None)
    mpicoll.run_local(apart, 2, timeout=60)


# --- what it costs

BUDGETS = {"announced": (37, 2), "staged": (43, 2)}
"""CUDA's calls, and the host's waits for the device, of a message on both ranks together."""


@pytest.mark.parametrize("way", BUDGETS)
def test_budgets(cuda: ModuleType, arrays: Cupy, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = count_cuda_calls(cuda, monkeypatch)
    if way == "staged":
        monkeypatch.setattr(peer_messages.PeerMessages, "send", lambda *arguments: None)

    def main() -> None:
        connect(arrays)
        world = mpicoll.world()
        x = arrays.put(values(world.rank))
        cuda.cuda.get_current_stream().synchronize()

        def repeat(count: int) -> None:
            for _ in range(count):
                if world.rank == 0:
                    mpicoll.send(x, 1)
                else:
                    mpicoll.recv(source=0, out=x)
                mpicoll.barrier()

        repeat(3)
        mpicoll.barrier()
        if world.rank == 0:
            counted.clear()
        mpicoll.barrier()
        repeat(10)
        mpicoll.barrier()
        if world.rank == 0:
            per_message = {name: count / 10 for name, count in counted.items()}
            calls, waits = BUDGETS[way]
            assert sum(per_message.values()) <= calls, per_message
            assert per_message.get("eventSynchronize", 0) <= waits, per_message
            assert not per_message.get("ipcOpenMemHandle"), per_message
        mpicoll.barrier()

    mpicoll.run_local(main, 2, timeout=60)


# --- processes that end

ENDING = """
import os, signal, sys, time
import cupy
import numpy as np
import mpicoll
world = mpicoll.world()
mpicoll.allreduce(cupy.ones(1))
x = cupy.asarray(np.full(100_000, world.rank + 1.0))
cupy.cuda.get_current_stream().synchronize()
if world.rank == 0:
    mpicoll.send(x, 1)
    x.fill(-1)
    cupy.cuda.get_current_stream().synchronize()
    if sys.argv[1] == "dies":
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
elif world.rank == 1:
    time.sleep(1)
    if sys.argv[1] == "missing":
        try:
            mpicoll.recv(x, 0, tag=7, timeout=0.5)
        except mpicoll.Timeout as error:
            print("late:", error, flush=True)
    out = mpicoll.recv(cupy.zeros(100_000), 0)
    print("received", float(out.get().min()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "missing"])
def test_a_sender_that_ends_before_its_message_is_received(tmp_path: Path, how: str) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    done = mpirun(2, script, how, **fake_cuda.environment(MPICOLL_REPORT="off"))
    assert done.returncode == 0, done.stdout
    assert "received 1.0" in done.stdout, done.stdout
    assert "ignored" not in done.stdout
    assert ("late: " in done.stdout) == (how == "missing"), done.stdout


@pytest.mark.slow
def test_a_sender_that_dies(tmp_path: Path) -> None:
    """The job ends, and says who died."""
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    done = mpirun(2, script, "dies", **fake_cuda.environment(MPICOLL_REPORT="off"))
    assert done.returncode not in (0, 124), done.stdout
    assert "rank 0" in done.stdout, done.stdout
