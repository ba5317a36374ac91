"""Another process that has the port of a rank that died before it was connected does not hide the death."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from support.star import Clock, Make, until

from mpicoll.transport.control import timing
from mpicoll.transport.control.dialer import Dialer
from mpicoll.transport.control.sockets import _listening_inodes, is_taken


@pytest.mark.parametrize("dead", [0, 1])
def test_a_port_of_another_process_is_no_sign_of_life(star: Make, dead: int) -> None:
    """Neither for the hub nor for a rank that connects to the hub. The other process accepts, and is silent."""
    clock = Clock()
    job = star(3, clock=clock)
    addresses = [line.address for line in job.lines]
    job.end(dead)
    with socket.create_server(("127.0.0.1", addresses[dead]["port"])):
        alive = [rank for rank in range(3) if rank != dead]
        for rank in alive:
            job.lines[rank].connect(addresses)

        def has_ended() -> bool:
            clock.now += 0.05
            job.drive(*alive)
            return all(job.gone(rank) == [(dead, "closed")] for rank in alive)

        until(has_ended, lambda: job.heard)


@pytest.mark.parametrize("alive", [True, False])
def test_only_a_rank_answers_a_probe_on_another_host(star: Make, alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't be seen there which process has the port; one that says something else has taken it. The hub probes
    after the death of another one, when all ranks have had time to connect."""
    clock = Clock()
    job = star(3, clock=clock)
    addresses = [line.address for line in job.lines]
    for rank, one in enumerate(addresses):
        one |= {"place": f"host {rank}", "addresses": ["127.0.0.1"]}
    asked, confirmed = [], []
    monkeypatch.setattr(Dialer, "confirm", lambda dialer, one: confirmed.append((one.role, one.rank)))
    with socket.create_server(("127.0.0.1", 0)) as other:
        if not alive:
            addresses[2]["port"] = other.getsockname()[1]
            job.end(2)
        other.setblocking(False)
        for line in job.lines[:2]:
            line.connect(addresses)
        until(lambda: job.drive(0, 1) or 1 in job.lines[0]._endpoint._links.clients)
        job.end(0)

        def step() -> None:
            clock.now += 0.02
            job.drive(1, *([2] if alive else []))
            with contextlib.suppress(BlockingIOError):
                sock, _ = other.accept()
                asked.append(sock)
                sock.sendall(b"HTTP/1.1 400 Bad Request")

        try:
            if alive:
                # It has not been given the addresses yet, so it does not connect.
                until(lambda: step() or ("probe", 2) in confirmed, lambda: job.heard)
                assert job.gone(1) == [(0, "closed")]
            else:
                until(lambda: step() or job.gone(1) == [(0, "closed"), (2, "closed")], lambda: job.heard)
                assert asked
        finally:
            for sock in asked:
                sock.close()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_silent_is_alive(star: Make, stopped: int) -> None:
    clock = Clock()
    job = star(2, clock=clock)
    addresses = [line.address for line in job.lines]
    other = 1 - stopped
    job.lines[other].connect(addresses)
    for _ in range(100):
        clock.now += timing.PROVE_WITHIN / 10
        job.drive(other)
    assert job.heard[other] == []
    job.lines[stopped].connect(addresses)
    job.lines[stopped].send({"here": stopped})
    until(lambda: job.drive(0, 1) or job.messages(other) == [{"here": stopped}], lambda: job.heard)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_which_socket_listens(family: socket.AddressFamily, address: str) -> None:
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    with socket.create_server((address, 0), family=family) as sock:
        port, inode = sock.getsockname()[1], os.fstat(sock.fileno()).st_ino
        assert not is_taken(port, [inode])
        assert not is_taken(port, [0, inode])
        assert is_taken(port, [inode + 1])
    assert not is_taken(port, [inode])


def test_sockets_of_a_kernel_that_does_not_list_listening_ones_first(tmp_path: Path) -> None:
    """Such as gVisor's."""
    table = tmp_path / "tcp"
    row = "{}: 0100007F:{:04X} 00000000:0000 {} 00000000:00000000 00:00000000 00000000 0 0 {} 1 0 100 0 0 10 0\n"
    table.write_text("sl local_address ...\n" + row.format(0, 80, "01", 7) + row.format(1, 80, "0A", 8))
    assert list(_listening_inodes(table, 80)) == [8]
