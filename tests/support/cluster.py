"""Jobs on hosts of ci/hosts.py with any number of ranks on each: nodes and hierarchy, training, the parameter server,
and the loss of a host. For tests/engine/test_cluster.py. As a program, this is run by each rank of such a job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import apart


def run(
    what: str, layout: Sequence[int], *options: str, setup: str = "", rate: str = "100mbit", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run one of the checks below on hosts with so many ranks. Each rank without an error prints "all right"."""
    launch = apart.hosts(*options, "--setup", setup, len(layout), ",".join(map(str, layout)), rate=rate)
    command = ["timeout", "--kill-after=5", "80", *launch, sys.executable, __file__, what, ",".join(map(str, layout))]
    return _run(command, variables)


def lose(layout: Sequence[int]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Lose the last host in the middle of a loop, as by a power failure. Return the job, and the seconds from then to
    its end."""
    with tempfile.TemporaryDirectory(prefix="mpicoll-cluster-") as name:
        cut = Path(name) / "cut"
        counts = ",".join(map(str, layout))
        launch = apart.hosts("--cut", str(len(layout) - 1), cut, len(layout), counts)
        command = ["timeout", "--kill-after=5", "80", *launch, sys.executable, __file__, "loss", counts, str(cut)]
        done = _run(command, {})
        return done, time.time() - (cut.stat().st_mtime if cut.exists() else 0)


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=apart.job_environ("", variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


# --- what a rank does


def _check_nodes(layout: Sequence[int]) -> None:
    import numpy as np

    import mpicoll

    world = mpicoll.world()
    nodes = tuple(node for node, ranks in enumerate(layout) for _ in range(ranks))
    assert (world.size, world.nodes) == (len(nodes), nodes), world.nodes
    local = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
    assert (world.local_rank, world.local_size) == (local.index(world.rank), len(local))
    inside = world.node_comm()
    assert inside.num_nodes == 1
    assert mpicoll.allreduce(np.array([world.rank]), comm=inside)[0] == sum(local)
    across = world.split(world.local_rank)
    assert across.local_size == 1
    hierarchical = ["hierarchical"] if len(set(layout)) == 1 and layout[0] > 1 else []
    for count in (1, 20_000):
        whole = np.arange(count, dtype=np.float64)
        for algorithm in ("native", *hierarchical, "ring", None):
            total = mpicoll.allreduce(whole + world.rank, algorithm=algorithm)
            np.testing.assert_array_equal(total, world.size * whole + sum(range(world.size)))
            result = mpicoll.allgather(whole + world.rank, algorithm=algorithm).reshape(world.size, -1)
            np.testing.assert_array_equal(result, [whole + rank for rank in range(world.size)])
        root = world.size - 1
        for algorithm in ("native", *hierarchical, "binomial", None):
            result = mpicoll.bcast(whole + world.rank, root=root, algorithm=algorithm)
            np.testing.assert_array_equal(result, whole + root)


def _check_connections(layout: Sequence[int]) -> None:
    """Compare large messages with what they have to be, and the ranks that connect with the setting WANTED."""
    import numpy as np

    import mpicoll

    world = mpicoll.world()
    whole = np.arange(150_000, dtype=np.float64)
    for collective, x in (("allreduce", whole + world.rank), ("bcast", whole + world.rank)):
        want = whole if collective == "bcast" else world.size * whole + sum(range(world.size))
        algorithms = ["ring", "hierarchical"] if collective == "allreduce" else ["binomial", "hierarchical"]
        for algorithm in algorithms if layout[0] > 1 else algorithms[:1]:
            np.testing.assert_array_equal(getattr(mpicoll, collective)(x, algorithm=algorithm), want)
    made = world._core.transport._connections  # type: ignore[attr-defined]
    connected = made is not None and any(made._made.values())
    assert mpicoll.allgather_object(connected).count(True) == (world.size if os.environ["WANTED"] == "yes" else 0)


def _check_training(layout: Sequence[int]) -> None:
    import mpicoll

    apart.train(mpicoll.world().rank, sum(layout))


def _check_parameters(layout: Sequence[int]) -> None:
    """Compare the weights of a parameter server, on the first host, with the same steps of one process."""
    import numpy as np

    import mpicoll
    from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker

    rank, size, steps = mpicoll.world().rank, sum(layout), 4
    if rank == 0:
        ParameterServer(SGD(lr=0.5), mode="sync", reduction="sum").run()
        return
    weights = {"w": np.zeros(30_000), "b": np.ones(3)}
    with Worker(weights) as worker:
        for _ in range(steps):
            worker.pull_weights()
            worker.push_gradients({name: np.full_like(one, rank) for name, one in weights.items()})
        worker.pull_weights()
    change = 0.5 * steps * sum(range(1, size))
    np.testing.assert_allclose(weights["w"], -change)
    np.testing.assert_allclose(weights["b"], 1 - change)


def _loop_until_loss(layout: Sequence[int], cut: Path) -> None:
    import numpy as np

    import mpicoll

    world = mpicoll.world()
    count = 0
    while True:
        mpicoll.allreduce(np.ones(2000))
        count += 1
        if count == 30 and world.rank == world.size - 1:
            cut.touch()
            time.sleep(0.3)  # the link is down
            os.kill(os.getppid(), signal.SIGKILL)  # the launcher's process of this host
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import mpicoll

    what, layout = sys.argv[1], [int(number) for number in sys.argv[2].split(",")]
    if what == "loss":
        _loop_until_loss(layout, Path(sys.argv[3]))
    for one in what.split(","):
        {
            "nodes": _check_nodes,
            "connections": _check_connections,
            "training": _check_training,
            "parameters": _check_parameters,
        }[one](layout)
    print(f"rank {mpicoll.world().rank}: all right", flush=True)


if __name__ == "__main__":
    main()
