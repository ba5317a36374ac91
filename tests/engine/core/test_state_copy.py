"""What goes on after a death: on threads, and on Open MPI's processes that are killed."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launch import mpirun

import mpicoll
from mpicoll.engine.core import state_copy
from mpicoll.transport.local import Kill

ULFM = ("--with-ft", "ulfm")


class Model:
    """With the methods by which torch's modules and optimizers are known."""

    def __init__(self, value: float) -> None:
        self.value = np.full(2, value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[...] = state["value"]


def test_a_state_is_put_back_in_place() -> None:
    array, model, inner = np.arange(3.0), Model(1.0), [1, 2]
    state: dict[str, Any] = {
        "a": array,
        "model": model,
        "inner": inner,
        "pair": (array, 4),
        "text": "x",
        "n": np.array(7),
    }
    saved = pickle.loads(pickle.dumps(state_copy.take_snapshot(state)))
    array += 1
    model.value += 1
    inner.append(3)
    state["text"], state["n"] = "y", np.array(8)
    state["more"] = 1
    assert state_copy.restore(saved, state) is state
    assert state.keys() == {"a", "model", "inner", "pair", "text", "n"}
    assert state["a"] is array
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert state["model"] is model
    assert model.value.tolist() == [1.0, 1.0]
    assert state["inner"] == [1, 2]
    assert state["pair"][1] == 4
    assert (state["text"], int(state["n"])) == ("x", 7)


def test_what_was_taken_shares_nothing() -> None:
    array, model = np.zeros(2), Model(0.0)
    saved = state_copy.take_snapshot([array, model, (array,)])
    array += 1
    model.value += 1
    first = state_copy.restore(saved, [np.empty(3), Model(9.0), ()])
    assert [first[0].tolist(), first[1].value.tolist(), first[2][0].tolist()] == [[0, 0], [0, 0], [0, 0]]
    first[0] += 5
    assert state_copy.restore(saved, [None, model, ()])[0].tolist() == [0, 0]


def test_a_state_that_can_not_be_loaded_is_copied() -> None:
    class Exported:
        value = 1

        def state_dict(self) -> dict[str, Any]:
            return {}

    state = Exported()
    saved = state_copy.take_snapshot([state])
    state.value = 2
    assert state_copy.restore(saved, [state])[0].value == 1


def step(state: dict[str, Any], number: int, comm: mpicoll.Communicator) -> None:
    data = np.random.default_rng(number).standard_normal((13, 5))
    mine = np.array_split(data, comm.size)[comm.rank].sum(axis=0)
    total = mpicoll.allreduce(mine, comm=comm)
    state["w"] += 0.1 * total * np.tanh(state["w"] + 1)
    state["n"] += 1


def trained(steps: int, every: int) -> tuple[int, int, np.ndarray]:
    state: dict[str, Any] = {"w": np.zeros(5), "n": 0}
    assert mpicoll.resilient(step, state, steps, every=every) is state
    return mpicoll.world().size, state["n"], state["w"]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("deaths", [{0: 0}, {3: 1}, {1: 6}, {2: 17}, {0: 5, 2: 11}, {1: 3, 2: 3, 3: 3}])
def test_each_step_counts_once(deaths: dict[int, int], every: int) -> None:
    _, _, expected = trained(20, 1)
    faults = [Kill(rank, nth) for rank, nth in deaths.items()]
    ends = mpicoll.run_local(trained, 4, 20, every, faults=faults, timeout=20)
    assert [rank for rank, end in enumerate(ends) if end is None] == sorted(deaths)
    for size, count, found in filter(None, ends):
        assert (size, count) == (4 - len(deaths), 20)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_nothing_is_repeated_without_a_death() -> None:
    def body() -> list[int]:
        seen: list[int] = []
        made: list[int] = []

        def note(state: int, number: int, tools: str) -> int:
            assert tools == "tools"
            seen.append(number)
            return state + number

        def setup(comm: mpicoll.Communicator) -> str:
            made.append(comm.size)
            return "tools"

        assert mpicoll.resilient(note, 0, 5, setup=setup) == 10
        assert made == [3]
        return seen

    assert mpicoll.run_local(body, 3) == [[0, 1, 2, 3, 4]] * 3


def test_other_errors_are_raised() -> None:
    def bad(state: int, number: int, comm: mpicoll.Communicator) -> int:
        raise ValueError(f"step {number}")

    with pytest.raises(ValueError, match="step 0"):
        mpicoll.resilient(bad, 0, 3)
    for steps, every in ((-1, 1), (1, 0)):
        with pytest.raises(mpicoll.ArgumentError, match="every at least 1"):
            mpicoll.resilient(bad, 0, steps, every=every)


def test_shrink_releases_all_waiting_ranks() -> None:
    """Rank 2 dies; 0 learns of it and shrinks, while 1 waits for 0 in a group without 2."""

    def body() -> tuple[int, ...]:
        world = mpicoll.world()
        pair = world.group([0, 1])
        if world.rank == 1:
            with pytest.raises(mpicoll.RankFailed):
                mpicoll.recv(np.empty(1), 0, comm=pair)
        elif world.rank == 2:
            mpicoll.send(np.empty(1), 0)
        else:
            with pytest.raises(mpicoll.RankFailed) as caught:
                mpicoll.allreduce(np.ones(4), algorithm="ring")
            assert caught.value.ranks == (2,)
        for communicator in (world, pair):
            with pytest.raises(mpicoll.RankFailed, match=r"shrink\(\)"):
                mpicoll.allreduce(1, comm=communicator)
        new = world.shrink()
        assert mpicoll.world() is new
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            mpicoll.barrier(comm=world)
        assert mpicoll.allreduce(1) == 2
        assert new.agree(True)
        assert not new.agree(new.rank == 0)
        return new.members

    assert mpicoll.run_local(body, 3, faults=[Kill(2, 0)], timeout=20) == [(0, 1), (0, 1), None]


def test_shrink_without_a_death() -> None:
    def body() -> int:
        return mpicoll.world().shrink().shrink().size + int(mpicoll.allreduce(1))

    assert mpicoll.run_local(body, 3) == [6] * 3


@pytest.mark.slow
def test_a_job_that_ends_with_its_first_rank_says_so(tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(
        "import mpicoll\n"
        "try:\n"
        "    mpicoll.world().shrink()\n"
        "except mpicoll.CommunicatorError as error:\n"
        "    print(error)\n"
        "print(mpicoll.resilient(lambda state, number, comm: mpicoll.allreduce(state), 1, 3), flush=True)\n"
    )
    done = mpirun(2, script)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("mpirun --with-ft ulfm") == 2
    assert re.findall("^8$", done.stdout, re.MULTILINE) == ["8", "8"]


KILLED = """
import os, signal, sys
import numpy as np
import mpicoll

what, victim = sys.argv[1], int(sys.argv[2])
world = mpicoll.world()
other = next(rank for rank in range(world.size) if rank not in (victim, world.rank))
small, large = np.ones(4), np.ones(100_000)
ways = {
    "native": lambda: mpicoll.allreduce(small, algorithm="native"),
    "schedule": lambda: mpicoll.allreduce(large, algorithm="ring"),
    "shared": lambda: mpicoll.allreduce(large, algorithm="shm_pipelined"),
    "background": lambda: [one.wait() for one in [mpicoll.iallreduce(small), mpicoll.iallreduce(large)]],
    "plan": mpicoll.allreduce_init(small),
    "recv": lambda: mpicoll.recv(small, other),  # of one that lives, and sends nothing
    "irecv": lambda: mpicoll.irecv(small, other).wait(),
    "probe": lambda: mpicoll.probe(other),
    "send": lambda: mpicoll.send(large, victim),
    "group": lambda: world.group(range(world.size)),
    "split": lambda: world.split(0),
}
try:
    mpicoll.barrier()  # out of which the victim may come before others
    if what in ("native", "schedule", "shared", "background", "plan"):
        for _ in range(20):
            ways[what]()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        ways[what]()
except mpicoll.RankFailed as error:
    assert error.ranks == (victim,), error
    assert f"rank {victim} of the job has died" in str(error), error
    assert "comm.shrink()" in str(error), error
for x in (small, large):
    try:
        mpicoll.allreduce(x)
        sys.exit("not refused")
    except mpicoll.RankFailed:
        pass
new = world.shrink()
assert new.members == tuple(rank for rank in range(world.size) if rank != victim)
for x in (small, large):
    assert (mpicoll.allreduce(x) == new.size).all()
    assert (mpicoll.iallreduce(x).wait() == new.size).all()
left, right = (new.rank - 1) % new.size, (new.rank + 1) % new.size
assert mpicoll.sendrecv(np.array(new.rank), right, left) == left
assert mpicoll.allreduce(1, comm=new.group(range(new.size))) == new.size
print("fine\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "victim"),
    [
        ("native", 0),
        pytest.param("schedule", 1, marks=pytest.mark.long),
        pytest.param("shared", 3, marks=pytest.mark.extension),
        pytest.param("background", 0, marks=pytest.mark.long),
        ("plan", 2),
        ("recv", 0),
        pytest.param("irecv", 3, marks=pytest.mark.long),
        ("probe", 1),
        pytest.param("send", 2, marks=pytest.mark.long),
        ("group", 0),
        pytest.param("split", 3, marks=pytest.mark.long),
    ],
)
def test_survivors_go_on(what: str, victim: int, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = mpirun(4, script, what, str(victim), options=ULFM)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("fine\n") == 3, done.stdout


REPEATED = """
import os, signal, sys
import numpy as np
import mpicoll
from mpicoll.transport import mpi

victims = (1, 3)
old = mpicoll.world()
pair = old.group((0, 2) if old.rank in (0, 2) else victims)
pending = mpicoll.irecv(np.empty(1), (old.rank + 2) % 4)
try:
    mpicoll.barrier()
    if old.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        mpicoll.allreduce(np.ones(4))
except mpicoll.RankFailed:
    pass
for victim in victims * 2:
    mpi.mark_dead(victim)
new = old
while set(new.members) & set(victims):
    new = new.shrink()
inner = new.group((0, 1))
for victim in victims:
    mpi.mark_dead(victim)
try:
    pending.wait()
    sys.exit("a message that nobody has sent")
except mpicoll.RankFailed:
    pass
for former in (old, pair):
    former._core.transport.revoke()
for comm in (new, inner):
    for count in (1, 100_000):
        assert (mpicoll.allreduce(np.ones(count), comm=comm) == 2).all()
print("fine\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_repeated_news_of_deaths_spares_the_new_communicator(tmp_path: Path) -> None:
    """Two ranks die at once; both deaths are reported before and after shrink, and old operations fail late."""
    script = tmp_path / "repeated.py"
    script.write_text(REPEATED)
    done = mpirun(4, script, options=ULFM)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("fine\n") == 2, done.stdout


def test_a_late_failure_spares_the_new_group() -> None:
    def body() -> int:
        old = mpicoll.world()
        new = old.shrink()
        old._core.transport.revoke()
        return int(mpicoll.allreduce(1, comm=new))

    assert mpicoll.run_local(body, 2, timeout=10) == [2, 2]
