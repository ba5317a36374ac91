"""What the commands share."""

from __future__ import annotations

import argparse
import io
import sys

import pytest

from mpicoll.cli import screen
from mpicoll.errors import SetupError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("8,1k,1m", [8, 1 << 10, 1 << 20]),
        ("1m,8,8", [8, 1 << 20]),
        ("4k-64k", [4096, 8192, 16384, 32768, 65536]),
        ("4K-4KiB", [4096]),
        ("3-20", [3, 6, 12]),
        ("8-32, 1g", [8, 16, 32, 1 << 30]),
    ],
)
def test_sizes(text: str, expected: list[int]) -> None:
    assert screen.sizes(text) == expected


def test_sizes_by_another_factor() -> None:
    assert screen.sizes("8-1k", 4) == [8, 32, 128, 512]


@pytest.mark.parametrize("text", ["", "0", "x", "8-", "64k-4k", "1.5m", "8,,9", "-8", "1t"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        screen.sizes(text)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 4, "1 MiB"),
        (64 << 20, "64 MiB"),
        (5 << 30, "5 GiB"),
    ],
)
def test_nbytes(number: int, expected: str) -> None:
    assert screen.nbytes(number) == expected


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (0, "0.00 ns"),
        (1.234e-7, "123 ns"),
        (9.996e-7, "1.00 µs"),
        (1.234e-6, "1.23 µs"),
        (12.34e-6, "12.3 µs"),
        (99.96e-6, "100 µs"),
        (999.6e-6, "1.00 ms"),
        (0.0456, "45.6 ms"),
        (789, "789 s"),
    ],
)
def test_seconds(time: float, expected: str) -> None:
    assert screen.seconds(time) == expected


@pytest.mark.parametrize(("per_second", "expected"), [(1e6, "0.00"), (1.5e9, "1.50"), (123.4e9, "123")])
def test_rate(per_second: float, expected: str) -> None:
    assert screen.rate(per_second) == expected


def test_a_table_is_complete_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"column {number}" for number in range(12)]
    # Square brackets are no markup.
    screen.console().print(screen.table("[bold]title", names, [["[red]cell"] * 12], caption="caption"))
    title, header, line, row, caption = (one for one in capsys.readouterr().out.splitlines() if one.strip())
    assert title.strip() == "[bold]title"
    assert all(name in header for name in names)
    assert set(line.strip()) == {"─"}
    assert row.count("[red]cell") == 12
    assert caption.strip() == "caption"


def test_a_terminal_at_the_other_end(capsys: pytest.CaptureFixture[str]) -> None:
    screen.console(40).print(screen.table("title", ["x" * 30, "y" * 30], [["1", "2"]]))
    plain = capsys.readouterr().out
    assert "\x1b[" in plain
    assert "…" in plain


def test_no_progress_unless_it_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (False, True):
        with screen.progress(shown) as bar:
            task = bar.add_task("something", total=2)
            bar.update(task, advance=1)
            bar.refresh()
        out, err = capsys.readouterr()
        assert out == ""
        assert ("something" in err) is shown


def test_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    for call in (screen.console, lambda: screen.table("", [], []), lambda: screen.progress(False)):
        with pytest.raises(SetupError, match=r"pip install 'mpicoll\[plot\]'"):
            call()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"pip install 'mpicoll\[plot\]'"):
        screen.require_matplotlib()


def test_width_of_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert screen.terminal_width() == 0
