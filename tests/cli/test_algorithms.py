from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpicoll import schedules
from mpicoll.cli import main
from mpicoll.schedules import Round, algorithms_of, collectives, get


def test_list_has_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "list"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    out = " ".join(text.split())
    for collective in collectives():
        for algorithm in algorithms_of(collective).values():
            assert f"{collective}/{algorithm.name}: " in out
            assert f"The busiest rank sends n times {algorithm.sent}." in out
    assert "…" not in out.split("n = bytes of the vector")[0]


def test_list_of_a_collective(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "list", "reduce"]) == 0
    out = capsys.readouterr().out
    assert "any root" in out
    said = "reduce/binomial: Reduce up a binomial tree, receiving from the smallest subtree first. Thakur, Rabenseifner"
    assert said in " ".join(out.split())
    assert "bcast" not in out


def test_verify_all_of_a_collective(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "verify", "allreduce", "--ranks", "1-5,8"]) == 0
    out = capsys.readouterr().out
    assert out.count("6 of 6") == out.count("correct") == len(algorithms_of("allreduce"))


def test_verify_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ring = get("allreduce", "ring")

    def generate(rank: int, size: int) -> Iterator[Round]:
        yield from list(ring.generate(rank, size))[:-1]

    monkeypatch.setattr(schedules, "find", lambda name: replace(ring, generate=generate))
    assert main(["algorithms", "verify", "allreduce/ring", "--ranks", "1-3"]) == 1
    out = capsys.readouterr().out
    assert "1 of 3" in out
    assert "wrong" in out
    assert "allreduce/ring, size 2, root 0: rank 0" in out


def test_cost_beside_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "cost", "bcast/chain", "--ranks", "5", "--segments", "10"]) == 0
    out = capsys.readouterr().out
    assert "bcast/chain on 5 ranks, 10 segments" in out
    (rounds,) = (line.split() for line in out.splitlines() if "rounds on the critical path" in line)
    assert rounds[5:7] == ["13", "13"]
    (messages,) = (line.split() for line in out.splitlines() if "messages of all ranks" in line)
    assert messages[-1] == "40"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    def read(*words: str) -> Any:
        assert main(["algorithms", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    listed = read("list", "bcast")["algorithms"]
    assert [one["name"] for one in listed] == list(algorithms_of("bcast"))
    assert {one["rounds"] for one in listed} == {one.rounds for one in algorithms_of("bcast").values()}
    (verified,) = read("verify", "allreduce/ring", "--ranks", "1-3")["algorithms"]
    assert (verified["correct"], verified["correct_ranks"], verified["messages"]) == (True, [1, 2, 3], 4 + 12)
    (cost,) = read("cost", "allreduce/ring", "--ranks", "4")["costs"]
    assert (cost["counted"]["rounds"], cost["counted"]["sent"], cost["closed_form"]["sent"]) == (6, "3/2", "3/2")


def test_json_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables are printed too."""
    file = tmp_path / "found.json"
    assert main(["algorithms", "cost", "allreduce/ring", "--ranks", "4", "--json", str(file)]) == 0
    assert "rounds on the critical path" in capsys.readouterr().out
    assert json.loads(file.read_text())["name"] == "ring"


@pytest.mark.slow
def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "draw", "allreduce/tree", "--ranks", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown == schedules.draw("allreduce/tree", 4) + "\n"
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".txt", b"allreduce/tree on 4 ranks")):
        file = tmp_path / f"tree{suffix}"
        assert main(["algorithms", "draw", "allreduce/tree", "--ranks", "4", "-o", str(file)]) == 0
        assert file.read_bytes().startswith(start)
    assert capsys.readouterr().out == ""


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["list", "nope"], "no collective 'nope'; there are"),
        (["verify", "bcast/nope"], "bcast has no algorithm 'nope'"),
        (["cost", "ring", "--ranks", "4"], "write collective/name"),
        (["draw", "allreduce/ring", "--ranks", "2-4"], "a picture is of one number of ranks, not of 3"),
        (["cost", "bcast/binomial", "--ranks", "4", "--root", "4"], "root 4 must be in [0, 4)"),
    ):
        assert main(["algorithms", *argv]) == 2
        assert text in capsys.readouterr().err
    for wrong in ("0", "5-3", "x"):
        with pytest.raises(SystemExit):
            main(["algorithms", "verify", "--ranks", wrong])
        assert "are no numbers of ranks" in capsys.readouterr().err


def test_a_picture_that_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ring.svg"
    words = ["algorithms", "draw", "allreduce/ring", "--ranks", "3", "--animate"]
    assert main([*words, "-o", str(file)]) == 0
    assert file.read_text() == schedules.animate("allreduce/ring", 3)
    for output in ([], ["-o", str(tmp_path / "ring.png")]):
        assert main([*words, *output]) == 2
        assert "give -o FILE.svg" in capsys.readouterr().err
