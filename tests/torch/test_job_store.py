"""The store of a job: who can reach it, what is in it, and what other backends of torch do with it."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.patches import patch_within

import mpicoll
from mpicoll.cli import listening
from mpicoll.config import Config
from mpicoll.torch import job_store, rendezvous_handler
from mpicoll.transport.control.interfaces import InterfaceAddress

BOUND = timedelta(seconds=120)

# Asks every port for the number of keys, as a client of torch's TCPStore does, and tries to open files of processes.
STRANGER = """
import json, os, socket, struct, sys
ports, files, seconds = json.loads(sys.argv[1])
"".encode("idna")  # imports what the other user may not be able to read
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
validate = b"\\0" + struct.pack("<I", 0x3C85F7CE)
count_keys = b"\\7"
stores = []
for port in ports:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(validate + count_keys)
            sock.settimeout(seconds)
            reply = sock.recv(8, socket.MSG_WAITALL)
            # The first words of other protocols make a larger number.
            if len(reply) == 8 and int.from_bytes(reply, "little") < 1 << 20:
                stores.append(port)
    except OSError:
        pass
opened = []
for file in files:
    try:
        os.close(os.open(file, os.O_RDWR))
    except OSError:
        pass
    else:
        opened.append(file)
print(json.dumps([stores, opened]))
"""


def listening_ports() -> list[int]:
    """The TCP ports at which this process listens."""
    return sorted({int(one.rpartition(":")[2]) for one in listening.list_sockets() if not one.startswith("unix:")})


def ask_as_a_stranger(ports: list[int], files: list[str], seconds: float) -> Any:
    """Return the ports of stores, which answer within `seconds`, and the files that another user can open."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", STRANGER, json.dumps([ports, files, seconds])],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return json.loads(done.stdout)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("mpicoll")
    yield
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks seem to be on a node each, of which there are two or more."""
    world, kind = mpicoll.world(), mpicoll.Communicator
    if world.size == 1:
        pytest.skip("needs two ranks")
    monkeypatch.setattr(kind, "num_nodes", property(lambda comm: comm.size))
    monkeypatch.setattr(kind, "node", property(lambda comm: comm.rank))
    monkeypatch.setattr(world, "nodes", tuple(range(world.size)))


def open_store(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def test_a_stranger_finds_a_store_that_listens() -> None:
    """What the next test relies on."""
    store = dist.TCPStore("localhost", 0, None, is_master=True)
    assert store.port in listening_ports()
    assert ask_as_a_stranger([store.port], ["/dev/null", "/nowhere"], 60) == [[store.port], ["/dev/null"]]


@pytest.mark.mpi
@pytest.mark.usefixtures("group")
def test_other_users_do_not_reach_the_store() -> None:
    base = open_store(dist.group.WORLD.get_group_store())
    files = [base.path] if isinstance(base, dist.FileStore) else []
    assert (base.path.split("/")[1:3] if files else ["proc", "self"]) == ["proc", "self"]
    files = [file.replace("self", str(os.getpid())) for file in files] if os.getuid() == 0 else []
    everything = mpicoll.allgather_object((listening_ports(), files))
    answer = None
    if dist.get_rank() == 0:
        ports, paths = ([one for mine in part for one in mine] for part in zip(*everything, strict=True))
        # Other sockets of the job do not answer.
        answer = ask_as_a_stranger(ports, paths, 1)
    assert mpicoll.bcast_object(answer) == [[], []]


@pytest.mark.mpi
@pytest.mark.usefixtures("group")
def test_nothing_is_left_in_the_file_system() -> None:
    base = open_store(dist.group.WORLD.get_group_store())
    if dist.get_world_size() == 1:
        assert isinstance(base, dist.HashStore)
        return
    assert str(Path(base.path).readlink()).endswith(" (deleted)")


@pytest.mark.mpi
@pytest.mark.usefixtures("group")
def test_groups_put_nothing_into_the_store() -> None:
    store = dist.group.WORLD.get_group_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    part = dist.new_group()
    dist.split_group(split_ranks=[list(range(dist.get_world_size()))])
    dist.monitored_barrier(timeout=BOUND)
    dist.monitored_barrier(part, timeout=BOUND)
    assert store.num_keys() == before


@pytest.mark.mpi
@pytest.mark.usefixtures("group")
def test_the_store_does_not_release_a_barrier() -> None:
    """Nor are texts in it reported."""
    store = dist.group.WORLD.get_group_store()
    late = dist.PrefixStore("barriers", store)
    for number in (1, 2):
        forged = dist.PrefixStore(f"monitored_barrier/{number}/", store)
        for key, text in (("report", "forged"), ("verdict", "forged"), ("arrived/1", "")):
            forged.set(key, text)
    dist.barrier()
    if dist.get_rank() == 0:
        late.set("rank 0 calls it", "")
    dist.monitored_barrier(timeout=BOUND)
    assert late.check(["rank 0 calls it"])


@pytest.mark.parametrize("text", ["forged", "-1", "1000000", "²"])
def test_a_rank_in_the_store_of_the_program_that_can_not_be(text: str) -> None:
    store = dist.HashStore()
    store.set("world_rank/1", text)
    with pytest.raises(mpicoll.ArgumentError, match="another program, or another group") as caught:
        rendezvous_handler.find_world_ranks(store, 0, 2)
    assert text not in str(caught.value)


def test_the_file_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In another folder where the first one can't be used, and nowhere if none can."""
    make = tempfile.mkdtemp
    usable = [str(tmp_path)]

    def mkdtemp(prefix: str, dir: str) -> str:
        if dir not in usable:
            raise PermissionError(dir)
        return make(prefix=prefix, dir=dir)

    patch_within(monkeypatch, job_store, tempfile, mkdtemp=mkdtemp, gettempdir=lambda: str(tmp_path))
    file = job_store._create_file()
    assert file is not None
    assert file.parent.parent == tmp_path
    assert [stat.S_IMODE(one.stat().st_mode) for one in (file, file.parent)] == [0o600, 0o700]
    assert file.stat().st_size == 0
    usable.clear()
    assert job_store._create_file() is None
    usable.append(str(tmp_path))
    patch_within(monkeypatch, job_store, os, write=full)
    before = list(tmp_path.iterdir())
    assert job_store._create_file() is None
    assert list(tmp_path.iterdir()) == before


def full(descriptor: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.mpi
def test_cycles_and_gloo_beside() -> None:
    for _ in range(3):
        dist.init_process_group("mpicoll")
        beside = dist.new_group(backend="gloo")
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank(), group=beside)
        assert found == list(range(dist.get_world_size()))
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.mpi
def test_another_backend_by_the_variables_that_are_set() -> None:
    """torch's own env:// can create its store at the port in MASTER_PORT."""
    dist.init_process_group("mpicoll")
    dist.barrier()
    dist.destroy_process_group()
    if mpicoll.world().size == 1:
        return
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == mpicoll.world().size
    dist.barrier()
    dist.destroy_process_group()


def use(made: job_store.JobStore) -> None:
    """Each rank reads what all have written."""
    world = mpicoll.world()
    made.store.set(str(world.rank), "here")
    assert [made.store.get(str(rank)) for rank in range(world.size)] == [b"here"] * world.size
    assert made.is_base_of(dist.PrefixStore("a", dist.PrefixStore("b", made.store)))
    assert not made.is_base_of(dist.HashStore())
    mpicoll.barrier()


@pytest.mark.mpi
def test_ranks_without_a_common_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store listens at the loopback interface only."""
    world = mpicoll.world()
    before = listening.list_sockets()
    if world.rank == world.size - 1:
        monkeypatch.setattr(job_store, "_open", lambda path: None)
    made = job_store.create_job_store(world)
    use(made)
    if world.size == 1:
        assert isinstance(made.store, dist.HashStore)
        return
    assert isinstance(made.store, dist.TCPStore)
    new = [f"127.0.0.1:{made.port}"] if world.rank == 0 else []
    assert [one for one in listening.list_sockets() if one not in before] == new
    mpicoll.barrier()


@pytest.mark.mpi
@pytest.mark.usefixtures("_apart")
def test_between_nodes_the_store_listens_where_all_ranks_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address is not of this host, and one rank can't connect to the second."""
    world = mpicoll.world()
    before = listening.list_sockets()
    monkeypatch.setattr(job_store, "_find_addresses", lambda: ["192.0.2.99", "127.0.0.3", "127.0.0.2"])
    monkeypatch.setattr(job_store, "_LOOPBACK", "127.0.0.3")
    connect = job_store._can_connect
    last = world.rank == world.size - 1
    monkeypatch.setattr(job_store, "_can_connect", lambda *to: not (last and to[0] == "127.0.0.3") and connect(*to))
    made = job_store._create_tcp_store(world)
    use(made)
    assert made.address == "127.0.0.2"
    new = [f"127.0.0.2:{made.port}"] if world.rank == 0 else []
    assert [one for one in listening.list_sockets() if one not in before] == new
    mpicoll.barrier()


@pytest.mark.mpi
@pytest.mark.usefixtures("_apart")
def test_the_store_listens_at_the_selected_interface_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not all ranks reach it, that is an error on all of them."""
    world = mpicoll.world()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if world.rank == 0:
        monkeypatch.setattr(job_store, "config", lambda: Config(interface=("ib0",)))
        monkeypatch.setattr(job_store, "select_addresses", lambda _: [InterfaceAddress("ib0", "127.0.0.2", 8)])
    made = job_store._create_tcp_store(world)
    assert made.address == "127.0.0.2"
    use(made)
    before = listening.list_sockets()
    if world.rank == world.size - 1:
        monkeypatch.setattr(job_store, "_can_connect", lambda *_: False)
    with pytest.raises(mpicoll.SetupError, match=r"MPICOLL_INTERFACE=ib0 selects 127\.0\.0\.2 on the host of"):
        job_store._create_tcp_store(world)
    assert listening.list_sockets() == before


@pytest.mark.mpi
@pytest.mark.usefixtures("_apart")
def test_no_interface_that_all_ranks_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    world = mpicoll.world()
    mine = f"127.0.0.{world.rank + 1}"
    monkeypatch.setattr(job_store, "_find_addresses", lambda: [f"127.0.0.{rank + 1}" for rank in range(world.size)])
    monkeypatch.setattr(job_store, "_LOOPBACK", "192.0.2.99")
    connect = job_store._can_connect
    monkeypatch.setattr(job_store, "_can_connect", lambda *to: to[0] == mine and connect(*to))
    made = job_store._create_tcp_store(world)
    assert made.address == mine
    use(made)
    monkeypatch.setattr(job_store, "_can_connect", lambda *to: False)
    if world.rank == 0:
        job_store._create_tcp_store(world)
    else:
        with pytest.raises(mpicoll.SetupError, match="can't connect to any address of rank 0, "):
            job_store._create_tcp_store(world)
