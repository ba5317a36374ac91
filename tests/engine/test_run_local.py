"""Ranks as threads: results, failures, and who is gone for whom."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpicoll
from mpicoll.config import config
from mpicoll.transport.local import Delay, Drop, Kill


def test_results_are_in_the_order_of_ranks() -> None:
    assert mpicoll.run_local(lambda: mpicoll.world().rank, 5) == [0, 1, 2, 3, 4]


def test_arguments() -> None:
    assert mpicoll.run_local(lambda a, b: (a, b, mpicoll.world().rank), 2, "x", 5) == [("x", 5, 0), ("x", 5, 1)]


@pytest.mark.parametrize("size", [0, -1])
def test_size(size: int) -> None:
    with pytest.raises(mpicoll.RankError, match=rf"run_local: size must be at least 1, got {size}"):
        mpicoll.run_local(lambda: None, size)


def test_wrong_arguments() -> None:
    with pytest.raises(mpicoll.RankError, match="run_local: size must be a number of ranks, got '2'"):
        mpicoll.run_local(lambda: None, "2")  # type: ignore[arg-type]
    with pytest.raises(mpicoll.ArgumentError, match="run_local: function must be a function that each rank calls"):
        mpicoll.run_local(3, 2)  # type: ignore[arg-type]
    with pytest.raises(mpicoll.ArgumentError, match="run_local: timeout must be a positive number of seconds"):
        mpicoll.run_local(lambda: None, 2, timeout="1")  # type: ignore[arg-type]


def test_an_invalid_setting_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_CHECK", "bogus")
    config.cache_clear()
    try:
        with pytest.raises(mpicoll.SetupError, match="bogus"):
            mpicoll.run_local(lambda: 1, 2)
    finally:
        monkeypatch.undo()
        config.cache_clear()


def test_a_failure_to_make_the_world_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise MemoryError("no memory for a communicator")

    monkeypatch.setattr("mpicoll.engine.run_local.CommunicatorCore", fail)
    with pytest.raises(MemoryError, match="no memory for a communicator"):
        mpicoll.run_local(lambda: 1, 2)


def test_a_run_inside_a_run() -> None:
    def inner() -> float:
        return mpicoll.allreduce(np.ones(1))[0]

    def outer() -> list[float]:
        values = mpicoll.run_local(inner, 2)
        return [*values, mpicoll.allreduce(np.ones(1))[0]]

    assert mpicoll.run_local(outer, 3) == [[2.0, 2.0, 3.0]] * 3


def test_a_rank_that_imports_torch_while_others_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "import time; time.sleep(0.3)\nclass autograd:\n    set_multithreading_enabled = staticmethod([].append)\n"
    )
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def body() -> str:
        return importlib.import_module("torch").__file__ or ""

    assert mpicoll.run_local(body, 3, timeout=10) == [str(tmp_path / "torch.py")] * 3


def test_runs_side_by_side() -> None:
    seen: list[list[float]] = []

    def one(size: int) -> None:
        seen.append(mpicoll.run_local(lambda: mpicoll.allreduce(np.ones(1))[0], size))

    threads = [threading.Thread(target=one, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [[1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]


def test_the_first_failure_is_raised_and_says_where() -> None:
    def main() -> None:
        if mpicoll.world().rank == 1:
            raise KeyError("the cause")
        mpicoll.barrier()  # fails as well, since rank 1 is gone

    with pytest.raises(KeyError, match="the cause") as caught:
        mpicoll.run_local(main, 3)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised on rank 1 of 3"]


@pytest.mark.extension
def test_the_cause_is_raised_rather_than_what_it_did_to_others() -> None:
    """Whichever rank is the first to end: here the others fail in the operation, and one goes on for a while."""

    def body() -> None:
        rank = mpicoll.world().rank

        def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            if rank == 1:
                raise ValueError("no such sum")
            return a + b

        try:
            mpicoll.allreduce(np.ones(1000), add, algorithm="shm_flat")
        except ValueError:
            time.sleep(0.3)
            raise

    with pytest.raises(ValueError, match="no such sum"):
        mpicoll.run_local(body, 3)


def test_a_failure_beside_a_background_operation_is_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def main() -> None:
        if mpicoll.world().rank == 0:
            mpicoll.iallreduce(np.ones(3))
            raise KeyError("the cause")
        mpicoll.recv(np.ones(3), 0)

    begin = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        mpicoll.run_local(main, 2, timeout=80)
    assert time.monotonic() - begin < 60
    # The operation in the background failed as well, and went with its rank.
    gc.collect()
    assert [record.name for record in caplog.records] == ["mpicoll"]


def test_a_rank_that_is_done_is_gone() -> None:
    def main() -> str:
        if mpicoll.world().rank == 0:
            return "done"
        with pytest.raises(mpicoll.RankFailed, match="rank 0 has exited") as caught:
            mpicoll.recv(np.ones(1), 0)
        assert caught.value.ranks == (0,)
        return "told"

    assert mpicoll.run_local(main, 3) == ["done", "told", "told"]


def test_what_a_rank_sent_before_it_was_done_still_arrives() -> None:
    def main() -> float | None:
        if mpicoll.world().rank == 0:
            mpicoll.send(np.full(1, 7.0), 1)
            return None
        return mpicoll.recv(np.ones(1), 0)[0]

    assert mpicoll.run_local(main, 2) == [None, 7.0]
    assert mpicoll.run_local(main, 2, faults=[Delay(0.1)]) == [None, 7.0]


def test_pending_operations_of_a_rank_that_is_done_are_carried_out() -> None:
    def main() -> float | None:
        if mpicoll.world().rank == 0:
            mpicoll.iallreduce(np.ones(1))
            return None
        return mpicoll.allreduce(np.ones(1))[0]

    assert mpicoll.run_local(main, 3) == [None, 3.0, 3.0]


# --- faults


def test_delays_change_nothing_but_the_time() -> None:
    def main() -> list[object]:
        x = np.arange(6.0) + mpicoll.world().rank
        forms = mpicoll.schedules.algorithms_of("allreduce")
        return [
            mpicoll.bcast(x, 1).tolist(),
            *(mpicoll.allreduce(x, algorithm=algorithm).tolist() for algorithm in forms),
            mpicoll.iallreduce(x).wait().tolist(),
            mpicoll.alltoall(x).tolist(),
        ]

    faults = [Delay(0.02, source=1), Delay(0.01, dest=0), Delay(0.015, source=2, dest=1)]
    assert mpicoll.run_local(main, 3, faults=faults) == mpicoll.run_local(main, 3)


def test_a_delay_takes_its_time() -> None:
    begin = time.monotonic()
    mpicoll.run_local(mpicoll.barrier, 2, faults=[Delay(0.2, source=0)])
    assert time.monotonic() - begin >= 0.2


def test_a_lost_message_is_reported_by_the_rank_that_waits_for_it() -> None:
    def main() -> None:
        mpicoll.bcast(np.ones(3), 0, algorithm="binomial")
        if mpicoll.world().rank == 0:
            # Stays, so that what the other lacks is the message and not its sender.
            mpicoll.irecv(np.ones(1), 1).wait(10)

    begin = time.monotonic()
    with pytest.raises(mpicoll.Timeout) as caught:
        mpicoll.run_local(main, 2, faults=[Drop(source=0, dest=1)], timeout=0.3)
    assert time.monotonic() - begin >= 0.3
    text = str(caught.value)
    assert "waits for a message from rank 0" in text
    assert text.endswith("nothing within 0.3 s")


def test_only_the_message_that_was_named_is_lost() -> None:
    def main() -> list[float]:
        if mpicoll.world().rank == 0:
            for number in range(6):
                mpicoll.send(np.full(1, float(number)), 1)
            return []
        return [mpicoll.recv(np.ones(1), 0)[0] for _ in range(4)]

    assert mpicoll.run_local(main, 2, faults=[Drop(0, 1, nth=1, count=2)])[1] == [0.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("nth", range(5))
@pytest.mark.parametrize("algorithm", mpicoll.schedules.algorithms_of("allreduce"))
def test_a_death_is_reported_to_ranks_that_need_the_dead_rank(algorithm: str, nth: int) -> None:
    """Nobody hangs, nobody gets a wrong value; the survivors either have all they need or are told who is gone."""

    def main() -> str:
        rank = mpicoll.world().rank
        try:
            for _ in range(5):
                assert mpicoll.allreduce(np.full(8, rank + 1.0), algorithm=algorithm).tolist() == [10.0] * 8
        except mpicoll.RankFailed as error:
            return f"told of {len(error.ranks)}"
        return "complete"

    begin = time.monotonic()
    results = mpicoll.run_local(main, 4, faults=[Kill(2, nth)], timeout=80)
    assert time.monotonic() - begin < 60
    assert results[2] is None
    assert set(results[:2] + results[3:]) <= {"told of 1", "told of 2", "told of 3", "complete"}
    assert any(str(result).startswith("told") for result in results)


def test_a_killed_rank_runs_no_handler_of_the_program() -> None:
    survived: list[int] = []

    def main() -> None:
        try:
            mpicoll.isend(np.ones(1), 0)
        except Exception:  # noqa: BLE001  as programs do
            survived.append(mpicoll.world().rank)

    assert mpicoll.run_local(main, 2, faults=[Kill(1)]) == [None, None]
    assert survived == []


def test_killed_in_the_background() -> None:
    def main() -> str:
        request = mpicoll.iallreduce(np.ones(1))
        try:
            request.wait()
        except mpicoll.RankFailed:
            return "told"
        return "complete"

    assert mpicoll.run_local(main, 2, faults=[Kill(1)], timeout=20) == ["told", None]


@pytest.mark.parametrize("make", ["split", "group"])
def test_new_groups_with_a_dead_member(make: str) -> None:
    def main() -> str:
        world = mpicoll.world()
        if world.rank == 1:
            mpicoll.send(np.ones(1), 0)
        with pytest.raises(mpicoll.RankFailed, match=r"rank 1 has exited|killed: rank 1"):
            world.split(0) if make == "split" else world.group([0, 1, 2])
        return "told"

    begin = time.monotonic()
    assert mpicoll.run_local(main, 3, faults=[Kill(1)], timeout=80) == ["told", None, "told"]
    assert time.monotonic() - begin < 60


def test_a_group_without_the_dead_goes_on() -> None:
    def main() -> float:
        world = mpicoll.world()
        if world.rank == 1:
            mpicoll.send(np.ones(1), 0)
        survivors = world.group([2, 0])
        assert survivors is not None
        return mpicoll.allreduce(np.ones(1), comm=survivors)[0]

    assert mpicoll.run_local(main, 3, faults=[Kill(1)], timeout=20) == [2.0, None, 2.0]


def test_receiving_from_any_rank_fails_when_all_others_are_gone() -> None:
    def main() -> str:
        if mpicoll.world().rank:
            return "done"
        with pytest.raises(mpicoll.RankFailed, match="waits for a message from any rank"):
            mpicoll.recv(np.ones(1))
        with pytest.raises(mpicoll.RankFailed, match="probes for a message from any rank"):
            mpicoll.probe()
        return "told"

    assert mpicoll.run_local(main, 3) == ["told", "done", "done"]
