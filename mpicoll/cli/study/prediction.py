"""Predictions by the simulator: time per step on more ranks than there are, on a described cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpicoll.cli.study.methods import Method
from mpicoll.errors import AlgorithmError
from mpicoll.schedules import Cluster, profile


def list_sizes(most: int, ranks_per_node: int) -> list[int]:
    """Return the numbers of ranks to predict: powers of two from 2 to `most` that fill nodes of `ranks_per_node`."""
    powers = [1 << k for k in range(1, most.bit_length())]
    return [power for power in powers if power % ranks_per_node == 0]


def predict(
    names: Sequence[str],
    sizes: Sequence[int],
    ranks: Sequence[int],
    cluster: Cluster,
    show: Callable[[str, int], None],
) -> dict[str, Any]:
    """Return the predicted seconds per step of the methods that have a schedule, for each size of the model in bytes
    and each number of ranks. `show` is called with what is being simulated, and 1 after each number of ranks."""
    points = []
    for count in ranks:
        now = replace(cluster, nodes=count // cluster.ranks_per_node)
        for label, method in _list_lines(names, count):
            show(f"simulating {count} ranks, {label}", 0)
            assert method.schedule is not None
            try:
                seen = profile(
                    method.schedule, now.nodes, now.ranks_per_node, segments=method.servers or 1, links=now.links
                )
            except AlgorithmError:
                continue  # more messages than are to be followed
            for nbytes in sizes:
                seconds = seen.seconds(nbytes, now)
                points.append(
                    {"label": label, **method._asdict(), "ranks": count, "nbytes": nbytes, "seconds": seconds}
                )
        show(f"simulated {count} ranks", 1)
    return {"cluster": asdict(cluster), "points": points}


def _list_lines(names: Sequence[str], ranks: int) -> list[tuple[str, Method]]:
    """Return the methods to predict, with their labels: parameter servers with 1, with 8, and with P / 4 servers."""
    found = []
    for name in names:
        if name == "parameter_server":
            servers = {"1": 1, "8": 8, "P / 4": ranks // 4}
            found += [
                (f"parameter server, S = {text}", Method(name, count))
                for text, count in servers.items()
                if 0 < count < ranks
            ]
        elif Method(name).schedule is not None:
            found.append((Method(name).label, Method(name)))
    return found
