"""mpicoll study sync: laws equal what schedules count and what hosts send, and the page shows what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from support import apart
from support.launch import mpirun

from mpicoll.cli import main
from mpicoll.cli.bench.measure import Wrong
from mpicoll.cli.study import job
from mpicoll.cli.study.laws import LAWS
from mpicoll.cli.study.methods import NAMES, Method, Model, list_methods
from mpicoll.cli.study.prediction import predict
from mpicoll.errors import ArgumentError
from mpicoll.schedules import Cluster, simulate, traffic

RANKS = 3


@pytest.mark.parametrize("name", LAWS)
def test_counted_bytes_of_each_link_equal_the_law(name: str) -> None:
    law = LAWS[name]
    for ranks in range(2, 17):
        for method in list_methods([name], range(1, ranks), ranks):
            assert method.schedule is not None
            stated = [law.of_rank(rank, ranks, method.servers) for rank in range(ranks)]
            counted = traffic(method.schedule, ranks, segments=method.servers or 1)
            assert counted == [(share, share) for share in stated], (method, ranks)
            assert max(stated) == method.law(ranks) == method.count_bytes(ranks)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of a study on 3 ranks, and its folder."""
    folder = tmp_path_factory.mktemp("study")
    words = ["study", "sync", "--sizes", "4k,64k", "--seconds", "0.01", "--predict", "16", "--label", "a <test>"]
    words += ["--servers", "1,2,3"]
    done = mpirun(RANKS, "-m", "mpicoll", *words, "--json", folder / "study.json", "--page", folder / "page")
    assert done.returncode == 0, done.stdout
    return done.stdout, folder


@pytest.mark.slow
def test_measurements(measured: tuple[str, Path]) -> None:
    output, folder = measured
    (run,) = json.loads((folder / "study.json").read_text())["runs"]
    assert (run["ranks"], run["nodes"], run["label"]) == (RANKS, 1, "a <test>")
    expected = [method for method in list_methods(NAMES, (1, 2), RANKS) if method.name != "hierarchical"]
    for nbytes in (4 << 10, 64 << 10):
        points = [point for point in run["points"] if point["nbytes"] == nbytes]
        assert [Method(point["method"], point["servers"]) for point in points] == expected
        assert all(point["seconds"] > 0 and len(point["blocks"]) >= 7 for point in points)
        assert all(point["wire"] is None for point in points)
    assert list(run["absent"]) == ["parameter server, S = 3", "hierarchical"]
    assert "without parameter server, S = 3: 3 servers of 3 ranks leave no worker" in output
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert "ring" in plain
    # A line that names a file is as long as its path.
    lines = [line.rstrip() for line in plain.splitlines() if not line.startswith("without") and str(folder) not in line]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert "3 ranks on one node, a <test>, a model of N = 64 KiB: one step" in plain


@pytest.mark.slow
def test_page(measured: tuple[str, Path]) -> None:
    folder = measured[1] / "page"
    text = (folder / "synchronisation.md").read_text()
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert pictures == [f"sync-{what}.svg" for what in ("patterns", "bytes", "time", "prediction")]
    for picture in pictures:
        ET.parse(folder / picture)
    assert "size of the model N" in (folder / "sync-time.svg").read_text()
    assert "Native, shared memory and hierarchical are left out of the prediction" in text
    assert "| ring | 2 (P - 1) / P N | Patarasuk and Yuan 2009 | 1.5 N | 1.875 N | 1.969 N |" in text
    html = (folder / "synchronisation.html").read_text()
    assert html.count("<svg") == html.count("<figure") == 4
    assert "a &lt;test&gt;" in html
    page = re.sub(r"<(meta|!DOCTYPE)[^>]*>|<figure.*?</figure>", "", html, flags=re.DOTALL)
    words = " ".join(ET.fromstring(page).itertext())
    assert not re.search(r"\*\*|`|^#|\|", words), words


@pytest.mark.long
def test_read(measured: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of several files; nothing is measured for it."""
    file = str(measured[1] / "study.json")
    assert main(["study", "sync", "--read", file, "--read", file, "--predict", "0", "--page", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("a model of N = 64 KiB: one step") == 2
    assert not (tmp_path / "sync-prediction.svg").exists()
    assert "Predicted" not in (tmp_path / "synchronisation.md").read_text()


@pytest.mark.long
def test_ranks_that_it_starts(tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    words = ["study", "sync", "--ranks", "2,3", "--sizes", "1k", "--seconds", "0.01", "--algorithms", "ring,tree"]
    subprocess.run([sys.executable, "-m", "mpicoll", *words, "--json", str(file)], check=True, timeout=100)
    assert [run["ranks"] for run in json.loads(file.read_text())["runs"]] == [2, 3]


def test_predictions_are_those_of_the_simulator() -> None:
    cluster = Cluster(nodes=1, ranks_per_node=2, net_alpha=5e-6)
    found = predict(NAMES, [1 << 20], [8, 16], cluster, lambda text, done: None)
    for ranks in (8, 16):
        (expected,) = simulate("allreduce", Cluster(ranks // 2, 2, net_alpha=5e-6), [1 << 20], algorithms=["ring"])
        (ring,) = (p for p in found["points"] if (p["label"], p["ranks"]) == ("ring", ranks))
        assert expected.points[0] is not None
        assert ring["seconds"] == pytest.approx(expected.points[0].seconds)
    servers = {(p["label"].partition("S = ")[2], p["ranks"], p["servers"]) for p in found["points"] if p["servers"]}
    assert servers == {("1", 8, 1), ("P / 4", 8, 2), ("1", 16, 1), ("P / 4", 16, 4), ("8", 16, 8)}


def test_wrong_weights_are_found() -> None:
    model = Model(400, 1)
    model.weights -= (2 * model.gradients - 1) / 1024
    assert model.check([0, 1])
    model.weights[7] += 1
    assert not model.check([0, 1])


def test_wrong_weights_end_the_study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(*arguments: Any) -> list[Any]:
        raise Wrong("ring of 8 B gives wrong weights")

    monkeypatch.setattr("mpicoll.cli.start_ranks.start", start)
    assert main(["study", "sync"]) == 1
    assert "gives wrong weights" in capsys.readouterr().err


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"points": []}')
    no_machine, no_ranks = tmp_path / "no_machine.json", tmp_path / "no_ranks.json"
    no_machine.write_text('{"runs": [{"ranks": 2, "nodes": 1, "points": [], "absent": {}}]}')
    no_ranks.write_text('{"runs": [{"ranks": 0, "nodes": 1, "points": [], "absent": {}, "machine": {}}]}')
    for words, message in (
        (["--algorithms", "ring,star"], "no algorithm 'star'; there are parameter_server, master_worker"),
        (["--read", str(other)], "other.json is not what `mpicoll study sync --json` writes"),
        (
            ["--read", str(no_machine)],
            "no_machine.json is not what `mpicoll study sync --json` writes: KeyError('machine')",
        ),
        (["--read", str(no_ranks)], "there are 0 ranks"),
        (
            ["--algorithms", "parameter_server", "--servers", "4", "--ranks", "2,3"],
            "--servers 4 leaves no worker on 3 ranks",
        ),
        (["--seconds", "0"], "--ranks-per-node and --seconds must be more than 0"),
        (["--seconds", "nan"], "--ranks-per-node and --seconds must be more than 0"),
        (["--predict", "-3"], "--predict must be at least 0, got -3"),
        (["--limit", "0"], "--limit must be a positive number of seconds, got 0.0"),
    ):
        assert main(["study", "sync", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["study", "sync", "--servers", "two"])
    assert "'two' is not a list of numbers such as 2,4" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="a single rank has nothing to synchronise"):
        job.main(0, job.Measurements(("ring",), (1,), (8,), 0.01, False))
    with monkeypatch.context() as patch:
        patch.setattr("mpicoll.cli.start_ranks.start", lambda *arguments: pytest.fail("it has measured"))
        assert main(["study", "sync", "--page", str(other / "page")]) == 2
        assert f"mpicoll: {other / 'page'}: Not a directory" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["study", "sync", "--page", str(tmp_path)]) == 2
    assert "pip install 'mpicoll[plot]'" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("hosts", [3, 4])
def test_bytes_on_the_wire_are_the_law_and_headers(hosts: int, tmp_path: Path) -> None:
    """Between hosts that this machine plays, each with one rank; each direction of each link."""
    if why := apart.possible():
        pytest.skip(f"this machine can't play hosts: {why}")
    file = tmp_path / "study.json"
    words = ["study", "sync", "--sizes", "1m,4m", "--seconds", "0.01", "--predict", "0", "--json", str(file)]
    command = apart.hosts(str(hosts), "1", sys.executable, "-m", "mpicoll", *words, rate="1gbit")
    subprocess.run(["timeout", "--kill-after=5", "100", *command], check=True, stdin=subprocess.DEVNULL)
    (run,) = json.loads(file.read_text())["runs"]
    assert run["nodes"] == hosts
    compared = set()
    for point in run["points"]:
        if point["method"] in LAWS:
            compared.add(point["method"])
            for rank, pair in enumerate(point["wire"]):
                least = float(LAWS[point["method"]].of_rank(rank, hosts, point["servers"]) * point["nbytes"])
                # Headers of Ethernet, IP and TCP are at most 5 % of full packets; acknowledgements, and what barriers
                # and the control network send, are a few KiB.
                assert all(least <= amount <= 1.06 * least + (32 << 10) for amount in pair), (point, rank)
    assert compared == set(LAWS)
