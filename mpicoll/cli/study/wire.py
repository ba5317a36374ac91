"""Bytes on the wire, by the counters of the network interfaces of each rank's host."""

from __future__ import annotations

from mpicoll.cli.bench.team import Team
from mpicoll.cli.study.methods import Method, Model, prepare_block
from mpicoll.proc_files import read_file

_COUNTED = 4
"""Number of steps after which the counters are read again."""


def count_link_bytes(team: Team, method: Method, model: Model) -> list[list[float]] | None:
    """Return the bytes per step that each rank sends and receives by the counters of its network interfaces; None
    unless each rank has a node of its own."""
    if team.comm.num_nodes < team.size:
        return None
    prepare_block(method, model, 0)()
    train = prepare_block(method, model, _COUNTED - 1)
    team.barrier()
    before = _read_interfaces()
    team.barrier()  # a rank that begins earlier would send bytes that another one does not count
    train()
    team.barrier()
    after = _read_interfaces()
    pairs = team.all(None if None in (before, after) else (before, after))
    if None in pairs:
        return None
    return [[(new - old) / _COUNTED for old, new in zip(*pair, strict=True)] for pair in pairs]


def _read_interfaces() -> tuple[int, int] | None:
    """Return the bytes that this host has sent and received, but for the loopback; None if the kernel counts none."""
    try:
        lines = read_file("/proc/net/dev").splitlines()[2:]
    except OSError:
        return None
    counters = [(name.strip(), rest.split()) for name, _, rest in (line.partition(":") for line in lines)]
    found = [(int(numbers[8]), int(numbers[0])) for name, numbers in counters if name != "lo"]
    return sum(sent for sent, _ in found), sum(received for _, received in found)
