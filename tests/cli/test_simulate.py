from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpicoll.cli import main
from mpicoll.errors import AlgorithmError
from mpicoll.schedules import Cluster, algorithms_of, profile, simulate

SMALL = ["--nodes", "4", "--ranks-per-node", "2", "--sizes", "8,1m"]


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["simulate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "allreduce on 8 ranks: 4 nodes of 2: time" in out
    for name in algorithms_of("allreduce"):
        assert name in out
    assert "8 B: recursive_doubling" in out
    assert "one rank, all do alike" in out
    assert "every rank" in out
    assert "simulated in" in out


def test_json_has_what_the_library_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "bcast", *SMALL, "--net-alpha", "5us", "--net-beta", "10GB/s", "--gamma", "0")
    cluster = Cluster(4, 2, net_alpha=5e-6, net_beta=1e-10, gamma=0)
    expected = simulate("bcast", cluster, [8, 1 << 20])
    assert [a["name"] for a in found["algorithms"]] == [f.algorithm.name for f in expected]
    for a, f in zip(found["algorithms"], expected, strict=True):
        for point, exact in zip(a["points"], f.points, strict=True):
            assert exact is not None
            assert point["seconds"] == pytest.approx(exact.seconds)
            assert (point["nbytes"], point["sent"]) == (exact.nbytes, exact.sent)
    assert found["wins"][0]["from"] == 8
    assert found["wins"][-1]["to"] == 1 << 20


def test_default_cluster_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "barrier", "--sizes", "8")
    assert (found["cluster"]["nodes"], found["cluster"]["ranks_per_node"]) == (1024, 128)
    found = as_json(capsys, "barrier", "--sizes", "8", "--ranks", "12")
    assert (found["cluster"]["nodes"], found["cluster"]["ranks_per_node"]) == (12, 1)
    found = as_json(capsys, "barrier", "--sizes", "8", "--ranks", "12", "--ranks-per-node", "4")
    assert (found["cluster"]["nodes"], found["cluster"]["ranks_per_node"]) == (3, 4)


def test_picture_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, numbers = tmp_path / "s.png", tmp_path / "s.json"
    argv = ["simulate", *SMALL, "--algorithms", "ring,tree", "--plot", str(picture), "--json", str(numbers)]
    assert main(argv) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [a["name"] for a in json.loads(numbers.read_text())["algorithms"]] == ["ring", "tree"]
    assert "ring" in capsys.readouterr().out


def test_what_could_not_be_simulated_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["simulate", "bcast", "--ranks", "2000", "--sizes", "8,1g", "--budget", "5000"]) == 0
    out = capsys.readouterr().out
    assert "not simulated at all sizes: chain: bcast/chain on 2000 ranks in 64 segments has more than 5000" in out
    assert "not simulated at all sizes: scatter_allgather: bcast/scatter_allgather on 2000 ranks has more" in out
    assert "not simulated" in out.split("1 GiB")[1]


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--ranks", "10", "--ranks-per-node", "4"]) == 2
    assert "10 ranks are not a whole number of nodes times 4" in capsys.readouterr().err
    assert main(["simulate", "--ranks", "10", "--nodes", "4"]) == 2
    assert "10 ranks are not 4 nodes times 1" in capsys.readouterr().err
    assert main(["simulate", "nope"]) == 2
    assert "no collective 'nope'" in capsys.readouterr().err
    for option in ("--nodes", "--ranks", "--ranks-per-node"):
        for number in ("0", "-8"):
            assert main(["simulate", "--ranks", "8", option, number]) == 2
            assert f"simulate: {option} must be at least 1, got {number}" in capsys.readouterr().err
    for wrong in ("fast", "-1us", "1.2.3", "0GB/s"):
        with pytest.raises(SystemExit):
            main(["simulate", f"--net-alpha={wrong}"])
        assert "is not a time; write for example 0.5us" in capsys.readouterr().err


def measured(cluster: Cluster, noise: float) -> dict[str, Any]:
    """As bench writes it: what the model itself says of all-reduce, with some noise and a contestant of no schedule."""
    points = []
    for place, nbytes in enumerate(1 << k for k in range(3, 27)):
        contestants: dict[str, Any] = {"mpi4py": {"state": "timed", "median": 1e-6}, "gloo": {"state": "absent"}}
        for name in ("ring", "recursive_doubling", "halving_doubling"):
            exact = profile(f"allreduce/{name}", cluster.nodes, cluster.ranks_per_node).seconds(nbytes, cluster)
            contestants[name] = {"state": "timed", "median": exact * (1 + noise * (-1) ** (place // 2))}
        points.append({"collective": "allreduce", "nbytes": nbytes, "ranks": cluster.size, "contestants": contestants})
    return {"ranks": cluster.size, "nodes": cluster.nodes, "points": points}


@pytest.mark.parametrize("nodes", [1, 4])
def test_costs_are_found_again(nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(nodes, 4, 3e-6, 0.2e-9, 40e-6, 8e-9, 0.3e-9)
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(measured(cluster, 0)))
    found = as_json(capsys, "--measured", str(file))
    assert found["median_error"] < 1e-6
    assert len(found["points"]) == found["fitted_to"] == 36
    assert found["cluster"]["node_alpha"] == pytest.approx(3e-6, rel=1e-3)
    assert found["cluster"]["gamma"] == pytest.approx(0.3e-9, rel=1e-3)
    if nodes > 1:
        assert found["cluster"]["net_beta"] == pytest.approx(8e-9, rel=1e-3)


def test_prediction_is_shown_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "bench.json", tmp_path / "fit.svg"
    file.write_text(json.dumps(measured(Cluster(1, 4, 3e-6, 0.2e-9, gamma=0.3e-9), 0.1)))
    assert main(["simulate", "--measured", str(file), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "fitted to 36 other points: node alpha" in out
    assert "net alpha" not in out
    error = int(out.split("median error of 36 predictions: ")[1].split("%")[0])
    assert 5 <= error <= 15
    assert b"<svg" in picture.read_bytes()


def test_files_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    no_nodes, deep = '{"ranks": 4, "nodes": 0, "points": []}', "[" * 100_000
    for text in ("{}", "[]", "no", deep, no_nodes, '{"ranks": 4, "points": [{"collective": "allreduce"}]}'):
        file.write_text(text)
        assert main(["simulate", "--measured", str(file)]) == 2
        assert "is not what `mpicoll bench --json` writes" in capsys.readouterr().err
    file.write_text('{"ranks": 4, "points": []}')
    assert main(["simulate", "--measured", str(file)]) == 2
    assert "0 timed points of schedules of allreduce, and at least 2" in capsys.readouterr().err
    file.write_text('{"ranks": 5, "nodes": 2, "points": []}')
    assert main(["simulate", "--measured", str(file)]) == 2
    assert "5 ranks on 2 nodes are not equally many" in capsys.readouterr().err


def test_an_error_under_a_launcher_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicoll.transport.launch_env.is_launched", lambda environment: True)
    with pytest.raises(AlgorithmError, match="no collective 'nope'"):
        main(["simulate", "nope"])
