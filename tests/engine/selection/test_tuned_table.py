"""The file that tuning writes: what is read, merged and written; and that all ranks come to the same of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import mpicoll
from mpicoll import config
from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.costs import TYPICAL, Link
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import UNTUNED
from mpicoll.engine.selection.rules import format_rules, parse_rules

INF = float("inf")
TWO = NodeLayout(2, 1, 2)
COSTS = {"node": [1e-6, 1e-10], "network": None, "gamma": 2e-10}

Job = Callable[..., "CompletedProcess[str]"]


def entry(rules: dict[str, str] | None = None, shape: NodeLayout = TWO, mpi: str = "Some MPI 1.0", **more: Any) -> Any:
    parsed = {kind: parse_rules(text) for kind, text in (rules or {"float": "allreduce:ring"}).items()}
    return tuned_table.make_entry(mpi, shape, parsed, COSTS, "2026-01-01T00:00:00+00:00") | more


def put(path: Path, *entries: Any, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"format": tuned_table.FORMAT, "version": tuned_table.VERSION, "entries": entries} | more)
    )
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the table is by default, for this test; the folder is not there."""

    def forget() -> None:
        config.config.cache_clear()
        tuned_table._read.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPICOLL_TUNED", raising=False)
    forget()
    yield tmp_path / "cache" / "mpicoll" / "tuned.json"
    monkeypatch.undo()
    forget()


def select_table(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MPICOLL_TUNED", value)
    # Threads of earlier tests may have read the variables since the test began.
    config.config.cache_clear()


def shared(library: str = "Some MPI 1.0", known: Any = None) -> Any:
    return tuned_table.share(0, lambda text: [text], library, known)


# --- where it is


def test_the_default_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned_table.get_default_path() == place
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/somewhere")
    assert tuned_table.get_default_path() == Path("/somewhere/.cache/mpicoll/tuned.json")


def test_no_table(place: Path) -> None:
    assert shared() is UNTUNED


def test_a_table_in_the_default_place(place: Path) -> None:
    put(place, entry({"float": "allreduce:0-1k:ring", "moved": "bcast:chain/2"}))
    table = shared()
    assert table.source == str(place)
    assert table.rules == {TWO: {"float": parse_rules("allreduce:0-1k:ring"), "moved": parse_rules("bcast:chain/2")}}
    assert table.costs.node == Link(1e-6, 1e-10)
    assert table.costs.network == TYPICAL.network
    assert (table.costs.gamma, table.costs.measured) == (2e-10, True)
    assert shared() is table


def test_a_table_with_former_names(place: Path) -> None:
    rules = {"float": "allreduce:0-4k:shm_flat,4k-inf:shm_pipelined/256k", "moved": "bcast:shm_pipelined"}
    text = put(place, entry(rules)).read_text()
    place.write_text(text.replace("shm_flat", "slots").replace("shm_pipelined", "pieces"))
    assert "0-4k:slots,4k-inf:pieces/256k" in place.read_text()
    assert shared().rules == {TWO: {kind: parse_rules(one) for kind, one in rules.items()}}
    tuned_table.write(place, entry({"float": "scan:linear"}))
    assert "allreduce:0-4k:shm_flat,4k-inf:shm_pipelined/256k;scan" in place.read_text()


def test_a_named_table(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(place, entry({"float": "allreduce:ring"}))
    named = put(tmp_path / "mine.json", entry({"float": "allreduce:tree"}))
    select_table(monkeypatch, str(named))
    assert shared().rules[TWO]["float"] == parse_rules("allreduce:tree")


def test_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(place, entry())
    select_table(monkeypatch, "off")
    assert shared() is UNTUNED


def test_a_table_of_those_before(place: Path) -> None:
    """What the world has counts, whatever the file says by now."""
    put(place, entry())
    table = shared()
    place.write_text("nonsense")
    tuned_table._read.cache_clear()
    assert shared(known=table) is table
    assert shared(known=UNTUNED) is UNTUNED


@pytest.mark.parametrize(
    "other",
    [{"mpi": "Some MPI 2.0"}, {"machine": {"cpu": "another", "cores": 1}}, {"machine": {}}],
    ids=["library", "machine", "nothing"],
)
def test_what_was_measured_elsewhere_is_left_out(place: Path, other: dict[str, Any]) -> None:
    put(place, entry({"float": "allreduce:ring"}) | other)
    assert shared() is UNTUNED
    put(place, entry({"float": "allreduce:ring"}) | other, entry({"float": "allreduce:tree"}))
    tuned_table._read.cache_clear()
    assert shared().rules[TWO]["float"] == parse_rules("allreduce:tree")


def test_several_shapes(place: Path) -> None:
    four, hosts = NodeLayout(4, 1, 4), NodeLayout(4, 2, 2)
    far = {"node": None, "network": [3e-5, 8e-9], "gamma": 4e-10}
    put(place, entry({"float": "scan:linear"}, four), entry({"moved": "bcast:chain"}, hosts, costs=far))
    table = shared()
    assert set(table.rules) == {four, hosts}
    assert (table.costs.node, table.costs.network) == (Link(1e-6, 1e-10), Link(3e-5, 8e-9))
    assert table.costs.gamma == 4e-10


def test_rules_for_devices(place: Path) -> None:
    """Stand beside the host's, and are merged by themselves."""
    first = {"float": "allreduce:tree", "float on GPU 7 shared by 2": "allreduce:0-1k:shm_flat"}
    second = {"float on GPU 7 shared by 2": "allreduce:1k-inf:ring", "half on GPU 7": "allreduce:shm_pipelined"}
    for rules in (first, second):
        tuned_table.write(place, entry(rules))
    expected = {
        "float": "allreduce:tree",
        "float on GPU 7 shared by 2": "allreduce:0-1k:shm_flat,1k-inf:ring",
        "half on GPU 7": "allreduce:shm_pipelined",
    }
    assert shared().rules == {TWO: {kind: parse_rules(text) for kind, text in expected.items()}}


def test_a_machine_is_identified_by_processor_and_cores() -> None:
    assert set(tuned_table.describe_machine()) == {"cpu", "cores"}
    assert tuned_table.describe_machine()["cores"] == os.cpu_count()
    assert os.uname().nodename not in json.dumps(tuned_table.describe_machine())


# --- what is no table

BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is not JSON: "),
    "binary": (b"\xff\xfe\x00", "is not JSON: "),
    "deep": ("[" * 100_000, "is not JSON: "),
    "list": ([], "is not a table of mpicoll"),
    "other": ({"version": 1}, "is not a table of mpicoll"),
    "newer": ({"format": tuned_table.FORMAT, "version": 2}, "has version 2, but this mpicoll supports version 1"),
    "no version": ({"format": tuned_table.FORMAT}, "has version None, but this mpicoll supports version 1"),
    "no entries": (
        {"format": tuned_table.FORMAT, "version": 1},
        "has an invalid entry (KeyError",
    ),
    "large": (" " * (5 << 20), "has more than 4 MiB, the limit for a table"),
}
ENTRIES: dict[str, tuple[Any, str]] = {
    "number": (7, "TypeError"),
    "empty": ({}, "KeyError"),
    "algorithm": (entry() | {"rules": {"float": "allreduce:rong"}}, "allreduce has no algorithm 'rong'"),
    "grammar": (entry() | {"rules": {"float": "ring"}}, "rule 'ring': expected"),
    "class": (entry() | {"rules": {"quarter": "allreduce:ring"}}, "unknown class of dtypes 'quarter'"),
    "devices": (entry() | {"rules": {"on GPU": "allreduce:ring"}}, "unknown class of dtypes 'on GPU'"),
    "rules": (entry() | {"rules": ["allreduce:ring"]}, "AttributeError"),
    "rule": (entry() | {"rules": {"float": 3}}, "AttributeError"),
    "ranks": (entry() | {"ranks": 0}, "is not a layout of ranks"),
    "nodes": (entry() | {"nodes": "1"}, "is not a layout of ranks"),
    "machine": (entry() | {"machine": "mine"}, "machine must be a dict and mpi a str"),
    "library": (entry() | {"mpi": None}, "machine must be a dict and mpi a str"),
    "cost": (entry() | {"costs": COSTS | {"gamma": "fast"}}, "'fast' is not a time"),
    "negative": (entry() | {"costs": COSTS | {"node": [-1, 0]}}, "-1 is not a time"),
    "endless": (entry() | {"costs": COSTS | {"node": [INF, 0]}}, "inf is not a time"),
    "huge": (entry() | {"costs": COSTS | {"gamma": 10**400}}, "OverflowError"),
    "huge range": (entry() | {"rules": {"float": f"allreduce:0-{'9' * 400}:ring"}}, "is not a number of bytes"),
    "segments": (entry() | {"rules": {"float": "bcast:chain/1000000"}}, "from 1 to 4096"),
    "link": (entry() | {"costs": COSTS | {"node": [1e-6]}}, "TypeError"),
}


def spoil(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def all_broken() -> list[Any]:
    found = [pytest.param(content, message, id=name) for name, (content, message) in BROKEN.items()]
    for name, (one, message) in ENTRIES.items():
        content = {"format": tuned_table.FORMAT, "version": 1, "entries": [entry(), one]}
        found.append(pytest.param(content, message, id=f"entry-{name}"))
    return found


@pytest.mark.parametrize(("content", "message"), all_broken())
def test_a_broken_table(
    content: Any, message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the default place it is left out, with a warning; a named one is an error; to neither can be added."""
    spoil(place, content)
    with pytest.warns(UserWarning, match="is ignored, since it ") as caught:
        assert shared() is UNTUNED
    (warning,) = caught
    assert str(warning.message).startswith(f"{place} is ignored, since it ")
    assert message in str(warning.message)
    before = place.read_bytes()
    with pytest.raises(mpicoll.SetupError, match="remove it, or pass another path with --output"):
        tuned_table.write(place, entry())
    assert place.read_bytes() == before

    select_table(monkeypatch, str(place))
    config.config.cache_clear()
    tuned_table._read.cache_clear()
    with pytest.raises(mpicoll.SetupError) as error:
        shared()
    assert str(error.value).startswith(f"MPICOLL_TUNED={str(place)!r}: it ")
    assert message in str(error.value)


@pytest.mark.parametrize(("make", "message"), [(None, "does not exist"), ("folder", "is not a regular file")])
def test_what_is_no_file(
    make: str | None, message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    if make:
        named.mkdir()
    select_table(monkeypatch, str(named))
    with pytest.raises(
        mpicoll.SetupError, match=f"it {message}; run `mpicoll tune` to write it, or set MPICOLL_TUNED=off"
    ):
        shared()


# --- adding to it


@pytest.mark.parametrize(
    ("new", "old", "both"),
    [
        ("", "", ""),
        ("allreduce:ring", "", "allreduce:0-inf:ring"),
        ("", "allreduce:ring", "allreduce:0-inf:ring"),
        ("allreduce:ring", "allreduce:0-1k:tree,1k-inf:native", "allreduce:0-inf:ring"),
        ("allreduce:1k-4k:ring", "allreduce:tree", "allreduce:0-1k:tree,1k-4k:ring,4k-inf:tree"),
        ("allreduce:1k-4k:tree", "allreduce:tree", "allreduce:0-inf:tree"),
        ("allreduce:0-2k:ring", "allreduce:1k-4k:tree", "allreduce:0-2k:ring,2k-4k:tree"),
        ("allreduce:2k-8k:ring", "allreduce:1k-4k:tree", "allreduce:1k-2k:tree,2k-8k:ring"),
        ("allreduce:8k-9k:ring", "allreduce:1k-4k:tree", "allreduce:1k-4k:tree,8k-9k:ring"),
        ("allreduce:1k-2k:ring,2k-4k:tree", "allreduce:2k-8k:native", "allreduce:1k-2k:ring,2k-4k:tree,4k-8k:native"),
        ("bcast:chain", "allreduce:ring", "allreduce:0-inf:ring;bcast:0-inf:chain"),
    ],
)
def test_new_rules_over_old_ones(new: str, old: str, both: str) -> None:
    assert format_rules(tuned_table.overlay(parse_rules(new), parse_rules(old))) == both


def test_a_first_table(place: Path) -> None:
    tuned_table.write(place, entry())
    assert tuned_table.load(place) == [entry()]
    assert [one.name for one in place.parent.iterdir()] == [place.name]
    assert shared().rules[TWO]["float"] == parse_rules("allreduce:ring")


def test_entries_accumulate(place: Path) -> None:
    four = NodeLayout(4, 1, 4)
    for one in (
        entry({"float": "allreduce:ring;scan:linear", "half": "allreduce:ring"}),
        entry({"float": "allreduce:tree"}, four),
        entry({"float": "allreduce:tree"}, mpi="Another MPI"),
        entry({"float": "allreduce:1k-2k:tree", "moved": "bcast:chain"}, costs=None),
    ):
        tuned_table.write(place, one)
    entries = tuned_table.load(place)
    assert [(one["ranks"], one["mpi"]) for one in entries] == [
        (4, "Some MPI 1.0"),
        (2, "Another MPI"),
        (2, "Some MPI 1.0"),
    ]
    assert entries[-1]["rules"] == {
        "float": "allreduce:0-1k:ring,1k-2k:tree,2k-inf:ring;scan:0-inf:linear",
        "half": "allreduce:0-inf:ring",
        "moved": "bcast:0-inf:chain",
    }
    assert entries[-1]["costs"] == COSTS
    assert len(shared().rules) == 2


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(mpicoll.SetupError, match=r"can't be written: .*; pass another path with --output"):
        tuned_table.write(tmp_path / "file" / "tuned.json", entry())
    (tmp_path / "folder").mkdir()
    with pytest.raises(mpicoll.SetupError, match=r"is not a regular file"):
        tuned_table.write(tmp_path / "folder", entry())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


# --- what all ranks make of it

SEEN = """
import os
from pathlib import Path
from mpi4py import MPI
from mpicoll.transport import mpi
rank = MPI.COMM_WORLD.rank
os.environ["MPICOLL_TUNED"] = PATHS[rank]
if PATHS[rank] != "off":
    path = Path(PATHS[rank])
    path.write_text(path.read_text().replace("LIBRARY", mpi.library()))
def seen(comm):
    told = mpicoll.explain("allreduce", 64, comm=comm).name
    everyone = MPI.COMM_WORLD.gather(told)
    if rank == 0:
        print(*everyone, flush=True)
    mpicoll.allreduce(np.ones(8, np.float32), comm=comm)
"""
"""The beginning of a program in which PATHS are the ranks' tables; ``seen`` prints what each rank would take."""


def tables(folder: Path, *names: str) -> list[str]:
    """Files that say different things for this machine, for any shape up to 3 ranks."""
    made = []
    for number, name in enumerate(names):
        entries = [entry({"float": f"allreduce:{name}"}, NodeLayout(ranks, 1, ranks), "LIBRARY") for ranks in (1, 2, 3)]
        made.append(str(put(folder / f"{number}.json", *entries)))
    return made


@pytest.mark.slow
def test_ranks_with_different_files_choose_alike(job: Job, tmp_path: Path) -> None:
    """In the world, in what is made of it, and in mpi4py's communicators, whose rank 0 is another one."""
    paths = tables(tmp_path, "ring", "tree")
    done = job(
        3,
        f"PATHS = {[*paths, 'off']}\n{SEEN}\n"
        "world = mpicoll.world()\n"
        "seen(world)\nseen(world.duplicate())\nseen(world.split(0, -rank))\n"
        "seen(MPI.COMM_WORLD.Split(0, -rank))\n",
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == ["ring ring ring"] * 4


@pytest.mark.slow
def test_communicators_of_mpi4py_before_the_world(job: Job, tmp_path: Path) -> None:
    """Each goes by its own rank 0, on all of its ranks; then the world does."""
    paths = tables(tmp_path, "ring", "tree")
    done = job(
        3,
        f"PATHS = {[*paths, 'off']}\n{SEEN}\n"
        "back = MPI.COMM_WORLD.Split(0, {0: 1, 1: 0, 2: 2}[rank])\n"
        "seen(back)\nseen(mpicoll.world())\nseen(back)\nseen(MPI.COMM_WORLD.Split(0, -rank))\n",
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [" ".join([name] * 3) for name in ("tree", "ring", "tree", "ring")]


@pytest.mark.slow
def test_a_broken_named_table_is_an_error_on_all_ranks(job: Job, tmp_path: Path) -> None:
    (good,) = tables(tmp_path, "ring")
    (tmp_path / "broken").write_text("{")
    text = (
        "try:\n    mpicoll.world()\n    told = 'none'\nexcept mpicoll.SetupError as error:\n"
        "    told = str(error)[:14]\n"
        "everyone = MPI.COMM_WORLD.gather(told)\nif rank == 0:\n    print(everyone)\n"
    )
    done = job(2, f"PATHS = {[str(tmp_path / 'broken'), good]}\n{SEEN}\n{text}")
    assert done.stdout.strip() == str(["MPICOLL_TUNED="] * 2)
    done = job(2, f"PATHS = {[good, str(tmp_path / 'broken')]}\n{SEEN}\n{text}")
    assert done.stdout.strip() == str(["none"] * 2)


@pytest.mark.slow
def test_a_broken_default_table_is_one_warning(job: Job, tmp_path: Path) -> None:
    spoil(tmp_path / "mpicoll" / "tuned.json", "{")
    program = (
        "import warnings\nfrom mpi4py import MPI\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n    world = mpicoll.world()\n"
        "    mpicoll.allreduce(np.ones(3), comm=MPI.COMM_WORLD)\n"
        "everyone = MPI.COMM_WORLD.gather([str(one.message) for one in caught])\n"
        "if world.rank == 0:\n    print(*everyone, sep='\\n')\n"
    )
    done = job(2, program, XDG_CACHE_HOME=str(tmp_path), MPICOLL_TUNED="")
    first, second = done.stdout.splitlines()
    assert first.count("is ignored, since it is not JSON") == 1
    assert second == "[]"


@pytest.mark.mpi
def test_a_table_is_sent_to_all_ranks() -> None:
    """A text that rank 0 alone has, through the transport of the world; also one that is longer than a line."""
    world = mpicoll.world()
    for text in ("", json.dumps({"source": "x" * 100_000, "entries": [entry()]})):
        known = tuned_table._parse_table(text if world.rank == 0 else "")
        assert tuned_table.share(world.rank, world._core.transport.allgather_text, "another MPI", known).text == text
