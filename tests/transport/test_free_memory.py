"""The limits of control groups, in files like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicoll.transport import free_memory as module
from mpicoll.transport import shm
from mpicoll.transport.free_memory import query_free_memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {4 << 20} kB\n"


class Machine:
    """A folder like /proc, and hierarchies of control groups."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MEMINFO)

    def mount(self, kind: str, path: str, root: str = "/") -> None:
        """The process is in the group at `path`; the part of the hierarchy below `root` is mounted."""
        options = {"cgroup": "rw,memory", "cgroup2": "rw,nsdelegate"}[kind]
        number, controllers = {"cgroup": (4, "cpu,memory"), "cgroup2": (0, "")}[kind]
        (self.proc / "self/cgroup").write_text(f"9:pids:/elsewhere\n{number}:{controllers}:{path}\n")
        mount = f"30 1 0:26 {root} {self.groups} rw,nosuid shared:9 - {kind} x {options}"
        (self.proc / "self/mountinfo").write_text(f"20 1 0:19 / /proc rw - proc proc rw\n{mount}\n")

    def limit(self, kind: str, path: str, most: str, used: int, inactive: int = 0, active: int = 0) -> None:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        names = {"cgroup": module._V1, "cgroup2": module._V2}[kind]
        (folder / names[0]).write_text(f"{most}\n")
        (folder / names[1]).write_text(f"{used}\n")
        prefix = {"cgroup": "total_", "cgroup2": ""}[kind]
        (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(module, "_PROC", made.proc)
    return made


def test_without_control_groups(machine: Machine) -> None:
    assert query_free_memory() == 4 * GIB
    (machine.proc / "meminfo").unlink()
    assert query_free_memory() is None


@pytest.mark.parametrize("kind", ["cgroup", "cgroup2"])
def test_the_least_of_all_levels_counts(machine: Machine, kind: str) -> None:
    machine.mount(kind, "/slurm/job/step")
    assert query_free_memory() == 4 * GIB  # the files are not there
    machine.limit(kind, "slurm/job/step", {"cgroup": str(2**63 - 4096), "cgroup2": "max"}[kind], GIB)
    assert query_free_memory() == 4 * GIB
    machine.limit(kind, "slurm/job", str(2 * GIB), GIB + 5, inactive=4, active=2)
    assert query_free_memory() == GIB + 1
    machine.limit(kind, "slurm", str(GIB), GIB, inactive=7)
    assert query_free_memory() == 7
    machine.limit(kind, "slurm", str(GIB), 2 * GIB)
    assert query_free_memory() == 0


@pytest.mark.parametrize("kind", ["cgroup", "cgroup2"])
@pytest.mark.parametrize("root", ["/docker/1", "/docker/2"])
def test_in_a_container(machine: Machine, kind: str, root: str) -> None:
    """The mounted part begins at the group of the container, or the path has nothing to do with it."""
    machine.mount(kind, "/docker/1", root)
    machine.limit(kind, "", str(GIB), 3)
    assert query_free_memory() == GIB - 3


@pytest.mark.parametrize("kind", ["cgroup", "cgroup2"])
def test_a_group_that_the_cache_of_files_has_filled(machine: Machine, kind: str) -> None:
    machine.mount(kind, "/job")
    machine.limit(kind, "job", str(4 * GIB), 4 * GIB, active=3 * GIB)
    assert query_free_memory() == 3 * GIB


def test_files_of_another_format(machine: Machine) -> None:
    for text in ("", "x\n", "0::\n", "\0:\n"):
        (machine.proc / "self/cgroup").write_text(text)
        (machine.proc / "self/mountinfo").write_text(f"{text}1 2 - cgroup2\n")
        assert query_free_memory() == 4 * GIB


def test_memory_beyond_the_limit_is_not_shared(machine: Machine) -> None:
    machine.mount("cgroup2", "/job")
    machine.limit("cgroup2", "job", str(64 << 20), 60 << 20)
    assert shm.share(2 << 20, lambda value: [value], 0, named=False)[0] is not None
    memories, why = shm.share(8 << 20, lambda value: [value], 0, named=False)
    assert memories is None
    assert f"the ranks need {8 << 20} bytes, and {4 << 20} are free" in why
