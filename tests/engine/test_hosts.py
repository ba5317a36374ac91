"""Several hosts, joined by slow links: nodes, right results, interfaces, and the loss of a link or a host.

The default tier has a sample; more loops of operations that lose a link: ci/partition.py.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support import apart, cluster


@pytest.fixture(scope="module", autouse=True)
def hosts() -> None:
    if why := apart.possible():
        pytest.skip(f"this machine can't play hosts: {why}")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["operations", pytest.param("training", marks=pytest.mark.long)])
def test_results_are_right(what: str) -> None:
    done = apart.right(what)
    assert done.returncode == 0, done.stdout
    assert [done.stdout.count(f"rank {rank}: all right") for rank in range(4)] == [1] * 4, done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_what_an_earlier_run_left_in_the_temporary_folder_stops_no_other(tmp_path: Path) -> None:
    # What Open MPI calls its folders; the ids of processes start anew in each run's own namespace.
    for pid in range(1, 200):
        (tmp_path / f"prted.{pid}").touch()
    done = apart.start(TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.iterdir())) == 199


@pytest.mark.slow
@pytest.mark.long
def test_a_cut_of_seconds_is_no_loss() -> None:
    done = apart.blink()
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("all right") == 4, done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_frozen_host_keeps_no_launcher() -> None:
    said, seconds = apart.freeze()
    assert "ranks 2 and 3 do not respond (stopped, frozen or without a core?)" in said, said
    assert seconds is not None, said
    assert seconds < 38, said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("loop", ["hierarchical", "recv"])
def test_hosts_that_lose_each_other(loop: str) -> None:
    outcome = apart.part(loop)
    assert not outcome.problems, f"{outcome.problems}\n" + "\n".join(outcome.said)


@pytest.mark.slow
def test_the_control_network_listens_at_the_selected_interface() -> None:
    done = apart.listen(MPICOLL_INTERFACE="ib0,10.78.0.0/16")
    assert done.returncode == 0, done.stdout
    assert sorted(re.findall(r"rank \d: .*", done.stdout)) == [
        "rank 0: 10.78.0.1 127.0.0.1",
        "rank 1: 10.78.0.2 127.0.0.1",
    ]


BRIDGE = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up; "
"""A bridge for containers, which has the same address on each host."""

LOST = """
ip link add lost type bridge; ip link set lost up
ip addr add 10.79.$SUBNET.$((HOST + 1))/24 dev lost; ip route add default dev lost
"""
"""An interface with the default route, which joins no hosts."""

ROUTED = """
ip addr flush dev eth0
ip addr add 10.78.0.$((HOST + 1))/32 dev eth0; ip route add 10.78.0.0/24 dev eth0
"""
"""Hosts without a common subnet on the interface that joins them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [(2, 1), pytest.param((1, 1, 1), marks=pytest.mark.long), pytest.param((2, 2), marks=pytest.mark.long)]
)
def test_nodes_that_all_have_a_bridge_of_the_same_address(layout: tuple[int, ...]) -> None:
    """Open MPI, which selects the interfaces here, took docker0 for a network that joins the hosts."""
    _check(cluster.run("nodes", layout, "--any-interface", setup=BRIDGE), layout)


SECOND_NETWORK = """
ip link add eth1 type bridge; ip link set eth1 up; ip addr add 10.80.0.$((HOST + 1))/24 dev eth1
"""
"""A subnet that the hosts seem to share at another interface, which joins none of them."""


@pytest.mark.slow
def test_open_mpi_uses_the_selected_interface() -> None:
    """Without the selection, Open MPI also connects at the interface that joins no hosts."""
    done = cluster.run("nodes", (1, 1), "--any-interface", setup=SECOND_NETWORK, MPICOLL_INTERFACE="10.78.0.0/16")
    _check(done, (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variables", "wanted"),
    [
        pytest.param((2, 2), {}, "yes", id="one interface"),
        pytest.param((1, 1), {"MPICOLL_SOCKETS": "off"}, "no", id="off", marks=pytest.mark.long),
        pytest.param((1, 1), {"setup": SECOND_NETWORK}, "no", id="two interfaces", marks=pytest.mark.long),
    ],
)
def test_connections_for_large_messages(layout: tuple[int, ...], variables: dict[str, str], wanted: str) -> None:
    _check(cluster.run("connections", layout, WANTED=wanted, **variables), layout)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("layout", [(2, 2), (2, 1), (1, 1, 1)])
def test_training_and_a_parameter_server(layout: tuple[int, ...]) -> None:
    _check(cluster.run("training,parameters", layout), layout)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1)])
def test_a_lost_host(layout: tuple[int, ...]) -> None:
    done, seconds = cluster.lose(layout)
    assert done.returncode not in (0, 124), done.stdout
    assert re.search(r"rank 2 of 3 can no longer be reached|lost the connection to rank 2", done.stdout), done.stdout
    assert seconds < apart.BOUND + apart.LAUNCHER, done.stdout


def _check(done: subprocess.CompletedProcess[str], layout: tuple[int, ...]) -> None:
    assert done.returncode == 0, done.stdout
    assert [done.stdout.count(f"rank {rank}: all right") for rank in range(sum(layout))] == [1] * sum(layout), (
        done.stdout
    )


NETWORKS = [
    pytest.param(BRIDGE, id="a bridge"),
    pytest.param(f"SUBNET=0; {LOST} {BRIDGE}", id="two shared subnets"),
    pytest.param(f"SUBNET=$HOST; {LOST} {ROUTED} {BRIDGE}", id="routes only"),
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("setup", NETWORKS)
def test_the_control_network_listens_where_the_hosts_reach_each_other(setup: str) -> None:
    """Not at a bridge, and not at the first interface, though it has the default route."""
    done = apart.listen(setup)
    assert done.returncode == 0, done.stdout
    # The launcher may write warnings of its own.
    assert sorted(re.findall(r"rank \d: .*", done.stdout)) == [
        "rank 0: 10.78.0.1 127.0.0.1",
        "rank 1: 10.78.0.2 127.0.0.1",
    ]


@pytest.mark.slow
@pytest.mark.long
def test_a_selection_that_one_host_does_not_have() -> None:
    done = apart.listen(MPICOLL_INTERFACE="10.78.0.1")
    assert done.returncode not in (0, 124), done.stdout
    assert "rank 1: MPICOLL_INTERFACE=10.78.0.1: host h1 has no such interface" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("selection", ["", "10.78.0.0/16"], ids=["by itself", "selected"])
@pytest.mark.parametrize("setup", NETWORKS[1:])
def test_open_mpi_connects_the_hosts(setup: str, selection: str) -> None:
    """By itself Open MPI finds the way too, but the job starts seconds later than with a selection."""
    layout = (2, 1)
    _check(cluster.run("nodes", layout, "--any-interface", setup=setup, MPICOLL_INTERFACE=selection), layout)
