"""The transport of ranks that are plain processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import start_ranks

CONNECT = """\
import os, sys, threading, time
import numpy as np
import torch.distributed as dist
import mpicoll
from mpicoll.transport import tcp
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def connect():
    return tcp.connect(dist.FileStore(path, size), rank, size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_all_of_the_protocol(size: int, tmp_path: Path) -> None:
    done = start_ranks(
        size,
        tmp_path,
        CONNECT
        + """
end = connect()
right, left = (rank + 1) % size, (rank - 1) % size
assert (end.rank, end.size, end.members, set(end.nodes)) == (rank, size, tuple(range(size)), {0})
assert end.native is None and end.mpi is None
assert end.allgather_text(f"from {rank}") == [f"from {one}" for one in range(size)]
assert end.compare(5, lambda: "", lambda: None, []) is None
if size > 1:
    assert end.compare(rank, lambda: f"{rank}", lambda: None, []) == [str(one) for one in range(size)]
for nbytes in (0, 1, 16 * 1024 - 24, 16 * 1024 - 23, 1_000_003):
    data, into = np.full(nbytes, rank, np.uint8), np.empty(nbytes, np.uint8)
    end.exchange([(right, data)], [(left, into)], 3)
    assert (into == left).all()
    # The tag decides, not the order; and a message of a collective is no message of the caller's.
    end.send(data, right, 1)
    end.isend(data, right, 2).wait(None)
    assert end.probe(left, 2, 5.0) == (left, 2, nbytes)
    assert end.recv(into, None, 2).tag == 2
    assert end.recv(into, left, None) == (left, 1, nbytes)
    end.agree(True)  # a rank that is ahead may have sent the next ones
    assert end.iprobe(None, None) is None
    end.agree(True)
posted = end.irecv(np.empty(4, np.uint8), left, 9)
assert end.list_posted_receives() == [(left, 9)] and posted.test() is None
assert posted.cancel() is None and end.list_posted_receives() == []
try:
    end.irecv(np.empty(1, np.uint8), left, 9).wait(0.05)
    raise AssertionError
except mpicoll.Timeout as error:
    assert "waits for a message from rank" in str(error), error
end.send(np.arange(5, dtype=np.uint8), right, 8)
small = np.zeros(2, np.uint8)
try:
    end.recv(small, left, 8)
    raise AssertionError
except mpicoll.TruncationError as error:
    assert f"a message of 5 bytes from rank {left} (tag 8) does not fit the 2 bytes" in str(error), error
assert small.tolist() == [0, 1]
half = end.split(rank % 2, -rank)
assert half.members == tuple(one for one in reversed(range(size)) if one % 2 == rank % 2)
again = end.group([rank])
again.send(small, 0, 0)
assert again.recv(small, 0, 0) == (0, 0, 2)
twin = end.duplicate(4)
assert len({one.key for one in (end, half, again, twin)}) == 4
assert twin.agree(True) and (size == 1 or not twin.agree(rank > 0))
assert twin.wait_for_all_ranks(5.0)
for failing in (end.revoke, end.shrink):
    try:
        failing()
        raise AssertionError
    except mpicoll.CommunicatorError as error:
        assert "mpirun --with-ft ulfm" in str(error)
twin.free()
end.free()
try:
    end.send(small, right, 0)
    raise AssertionError
except mpicoll.CommunicatorError as error:
    assert "the connections to the other ranks are closed" in str(error)
""",
    )
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * size


@pytest.mark.slow
def test_the_end_of_a_rank_is_an_error_at_once(tmp_path: Path) -> None:
    """Of one that dies, of one that leaves, and of one that a wait needs only through another rank."""
    done = start_ranks(
        4,
        tmp_path,
        CONNECT
        + """
end = connect()
nothing = np.empty(1, np.uint8)
if rank == 3:
    os.kill(os.getpid(), 9)
if rank == 2:
    end.recv(nothing, 0, 1)
    end.free()
    sys.exit()
begin = time.monotonic()
for source in (3, None):
    try:
        end.recv(nothing, source, 0)
        raise AssertionError
    except mpicoll.RankFailed as error:
        assert error.ranks == (3,) and "rank 3 (process " in str(error) and "has died" in str(error), error
try:
    end.exchange([], [(1 - rank, nothing)], 0)  # which the other rank does not answer
    raise AssertionError
except mpicoll.RankFailed as error:
    assert error.ranks == (3,), error
if rank == 0:
    end.send(nothing, 2, 1)
try:
    end.recv(nothing, 2, 0)
    raise AssertionError
except mpicoll.RankFailed as error:
    assert error.ranks == (2,) and "has left: it makes no more calls" in str(error), error
assert time.monotonic() - begin < 10
# Neither leaves while the other still waits for it.
if rank == 0:
    end.recv(nothing, 1, 2)
else:
    end.send(nothing, 0, 2)
end.free()
""",
    )
    assert [(one.returncode, one.stdout) for one in done] == [(0, ""), (0, ""), (0, ""), (-9, "")]


@pytest.mark.slow
def test_a_rendezvous_that_fails_says_why(tmp_path: Path) -> None:
    done = start_ranks(
        2,
        tmp_path,
        CONNECT
        + """
from datetime import timedelta
store = dist.FileStore(path, 2)
store.set_timeout(timedelta(seconds=2))
try:
    tcp.connect(dist.PrefixStore("alone", store) if rank else dist.PrefixStore("other", store), rank, 2)
except mpicoll.Timeout as error:
    assert f"rank {1 - rank} has not come to the rendezvous" in str(error), error
errors = []
def take_rank_0(meeting):
    try:
        tcp.connect(dist.PrefixStore(meeting, dist.FileStore(path, 2)), 0, 2)
    except Exception as error:
        errors.append(error)
if rank == 0:
    threads = [threading.Thread(target=take_rank_0, args=("same",), daemon=True) for _ in range(2)]
    for one in threads:
        one.start()
    while not errors:
        time.sleep(0.01)
    assert "several processes are rank 0 of 2" in str(errors[0]), errors
""",
    )
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * 2
