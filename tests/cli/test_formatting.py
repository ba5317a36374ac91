"""What the commands share."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mpicoll
from mpicoll import cli
from mpicoll.cli import formatting
from mpicoll.errors import ArgumentError, SetupError


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
    assert formatting.sizes(text) == expected


def test_sizes_by_another_factor() -> None:
    assert formatting.sizes("8-1k", 4) == [8, 32, 128, 512]


@pytest.mark.parametrize("text", ["", "0", "x", "8-", "64k-4k", "1.5m", "8,,9", "-8", "1t"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        formatting.sizes(text)


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
    assert formatting.nbytes(number) == expected


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
    assert formatting.seconds(time) == expected


@pytest.mark.parametrize(("per_second", "expected"), [(1e6, "0.00"), (1.5e9, "1.50"), (123.4e9, "123")])
def test_rate(per_second: float, expected: str) -> None:
    assert formatting.rate(per_second) == expected


def test_a_table_is_as_wide_as_columns_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    names = [f"column {number}" for number in range(12)]
    # Square brackets are no markup.
    formatting.console().print(formatting.table("[bold]title", names, [["[red]cell"] * 12], caption="caption"))
    title, header, line, row, caption = (one for one in capsys.readouterr().out.splitlines() if one.strip())
    assert title.strip() == "[bold]title"
    assert all(name in header for name in names)
    assert set(line.strip()) == {"─"}
    assert row.count("[red]cell") == 12
    assert caption.strip() == "caption"


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("columns", [40, 80])
def test_columns_that_do_not_fit_go_below(
    rich: bool, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut off, and each part begins with the first column."""
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    heads = ["name", *(f"column {number}" for number in range(12))]
    rows = [[f"row {row}", *(f"{row}.{column:06}" for column in range(12))] for row in range(2)]
    formatting.console(columns).print(formatting.table("[title]", heads, rows, caption="caption"))
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = plain.splitlines()
    assert lines[0] == "[title]"
    assert max(map(len, lines)) <= columns
    parts = sum(line.split()[:1] == ["name"] for line in lines)
    assert parts > 1
    for row in rows:
        assert plain.count(row[0]) == parts
        assert all(plain.count(cell) == 1 for cell in (*heads[1:2], *row[1:]))


@pytest.mark.parametrize(
    "words",
    [
        "algorithms list",
        "algorithms verify allreduce --ranks 1-3",
        "algorithms cost allreduce/double_tree --ranks 5 --segments 3",
        "simulate allreduce --ranks 16 --sizes 8,1m",
    ],
)
def test_what_commands_print_fits(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(words.split()) == 0
    assert 40 < max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("columns", [None, "40"])
def test_in_a_pipe_a_table_is_folded(
    rich: bool, columns: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 80 columns, or COLUMNS: titles, captions and cells that are too wide."""
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    words = " ".join(f"word{number}" for number in range(30))
    formatting.console().print(formatting.table(words, ["a", "b", words], [[words, "x" * 100, "c"]], caption=words))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns or 80)
    # The first column is repeated beside each of the others; the title, the caption and a head are words, too.
    assert [out.count(f"word{number}") for number in range(10, 30)] == [5] * 20
    assert out.count("x") == 100


@pytest.mark.parametrize("rich", [True, False])
def test_names_are_not_broken_for_wide_columns(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    name, words = "reduce_scatter/recursive_halving", " ".join(["word"] * 20)
    monkeypatch.setenv("COLUMNS", "80")
    formatting.console().print(formatting.table("", ["name", "text"], [[name, words]]))
    assert name in capsys.readouterr().out


def test_no_progress_unless_it_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (False, True):
        for total in (2, None):
            with formatting.steps(shown, total, patience=0) as step:
                step("[something]", 1)
            out, err = capsys.readouterr()
            assert out == ""
            assert ("[something]" in err) is shown


def test_no_progress_of_what_is_soon_done(capsys: pytest.CaptureFixture[str]) -> None:
    for measures in (True, False):
        with formatting.steps(True, 2, measures=measures, patience=60) as step:
            step("something", 1)
        assert capsys.readouterr() == ("", "")


def test_progress_of_what_measures_nothing_needs_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    import time

    shown, until = "", time.monotonic() + 60
    with formatting.steps(True, 2, measures=False, patience=0) as step:
        step("something", 0)
        while "something" not in shown and time.monotonic() < until:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    assert "something" in shown


@pytest.mark.parametrize("terminals", [(), ("stdout",), ("stderr",), ("stdout", "stderr")])
def test_where_progress_is_shown(terminals: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda name=name: name in terminals)
        monkeypatch.setattr(sys, name, stream)
    both = len(terminals) == 2
    assert [formatting.shows_progress(target) for target in (None, "x.json", "-")] == [both, both, False]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formatting.write_json(tmp_path / "x.json", {"a": 1})
    assert capsys.readouterr().out == ""
    formatting.write_json("-", {"a": 1})
    assert capsys.readouterr().out == (tmp_path / "x.json").read_text() == '{\n "a": 1\n}\n'


def test_json_that_can_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can be known is said before the command begins, the rest without a traceback."""
    for target, said in (
        (tmp_path, "it is a directory; name a file"),
        (tmp_path / "no" / "x.json", f"there is no directory {tmp_path / 'no'}"),
        ("/dev/full", os.strerror(errno.ENOSPC)),
    ):
        assert cli.main(["algorithms", "list", "--json", str(target)]) == 2
        assert capsys.readouterr() == ("", f"mpicoll: --json {target}: {said}\n")


def test_a_file_that_this_user_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or refused.append(path))
    for path in (tmp_path / "new", tmp_path / "old"):
        (tmp_path / "old").touch()
        with pytest.raises(ArgumentError, match=f"--json {path}: this user may not write there"):
            formatting.check_writable("--json", path)
    assert refused == [tmp_path, tmp_path / "old"]


@pytest.mark.parametrize("words", ["", "--help", "algorithms list", "algorithms list --json"])
def test_a_reader_that_has_closed_stdout(words: str) -> None:
    """Such as head, after its lines: there is no traceback, and the status is that of a program ended by SIGPIPE."""
    receive, send = os.pipe()
    os.close(receive)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(send, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "mpicoll", *words.split()],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environ,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.stderr, done.returncode) == ("", 128 + signal.SIGPIPE)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["", "algorithms list", "algorithms list --json"])
def test_a_full_device_at_stdout(words: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "mpicoll", *words.split()],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == "mpicoll: the output can't be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("words", ["", "algorithms list", "algorithms list --json", "completion bash"])
def test_no_stdout(words: str) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "mpicoll", *words.split()],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("words", ["algorithms draw allreduce/ring --ranks 3", "simulate --ranks 4 --sizes 8"])
def test_a_terminal_without_unicode(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpicoll", *words.split()],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        text=True,
        encoding="ascii",
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert "?" in done.stdout


def test_an_overview_without_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It names each command, with words that its parser takes, and fits a terminal, also in a version between tags."""
    monkeypatch.setattr(cli, "__version__", "10.10.10.dev1000+g0123456789ab.d20261129")
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = [line[2:].partition("   ")[0].split()[1:] for line in out.splitlines() if line.startswith("  mpicoll")]
    assert {words[0] for words in lines} == set(cli.COMMANDS)
    for words in lines:
        cli.make_parser(words).parse_args(words)


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables are plain text, and there is no progress bar."""
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    formatting.console(0).print(
        formatting.table("title", ["a", "bcd"], [["1234", "5"]], caption="caption"), "[red]line"
    )
    with formatting.steps(True, 2, patience=0) as step:
        step("something", 1)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        *("title", "", "  a      bcd", "  ────   ───", "  1234     5", "", "caption", "", "[red]line")
    ]
    assert err == ""


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command where neither rich nor matplotlib is installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(('rich', 'matplotlib', 'sklearn')))\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "mpicoll", *words],
        env=os.environ | {"PYTHONPATH": path, "MPICOLL_TUNED": "off"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("algorithms list bcast", "bcast/chain"),
        ("algorithms verify bcast --ranks 3", "correct"),
        ("algorithms cost allreduce/ring --ranks 4", "rounds on the critical path"),
        ("simulate bcast --ranks 4 --sizes 8", "fastest"),
        ("bench barrier -np 1 --seconds 0.01", "barrier"),
        ("tune barrier -np 2 --seconds 0.01 --dry-run", "winner"),
        ("--version", mpicoll.__version__),
    ],
)
def test_commands_without_extras(tmp_path: Path, words: str, shown: str) -> None:
    done = run(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("bench barrier -np 2 --seconds 0.01", {"machine", "points", "settings"}),
        ("tune barrier -np 2 --seconds 0.01 --dry-run", {"jobs"}),
        ("study sync --ranks 2 --sizes 1k --seconds 0.01 --predict 0 --algorithms ring", {"runs", "prediction"}),
    ],
)
def test_nothing_but_json_where_it_goes_to_stdout(tmp_path: Path, words: str, keys: set[str]) -> None:
    """Of commands whose ranks run in other processes."""
    done = run(tmp_path, *words.split(), "--json")
    assert done.returncode == 0, done.stderr
    assert keys <= json.loads(done.stdout).keys()


@pytest.mark.parametrize(
    "words",
    [
        "algorithms draw bcast/chain --ranks 2 -o {}.foo",
        "algorithms draw bcast/chain --ranks 2 -o {}",
        "algorithms draw bcast/chain --ranks 2 -o {}/none/x.png",
        "algorithms draw bcast/chain --ranks 2 -o {}/none/x.txt",
        "simulate bcast --ranks 2 --sizes 8 --plot {}.foo",
        "simulate bcast --ranks 2 --sizes 8 --plot {}/none/x.png",
        "simulate bcast --ranks 2 --sizes 8 --json {}/none/x",
        "simulate bcast --measured {}/none",
        "trace summary {}/none",
        "trace merge {}/none",
        "trace report {}/none",
        "trace report {}",
        "bench bcast --json {}/none/x",
        "bench bcast --plot {}.foo",
        "tune bcast --output {}/none/x/y",
    ],
)
def test_files_that_can_not_be_used(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the file, and status 2."""
    blocked = tmp_path / "file"
    folder = tmp_path if words.startswith("trace report") else blocked
    blocked.write_text("")
    assert cli.main(words.format(folder).split()) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert str(folder) in err


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"pip install 'mpicoll\[plot\]'"):
        formatting.require_matplotlib()


def test_width_of_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert formatting.terminal_width() == 0


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pending = {"mpicoll": cli.make_parser([])}
    seen = 0
    while pending:
        name, parser = pending.popitem()
        seen += 1
        assert not [line for line in parser.format_help().splitlines() if len(line) > 80], name
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending |= {f"{name} {word}": one for word, one in action.choices.items()}
    assert seen > 15


def test_remarks_are_folded_below_their_column() -> None:
    formatter = formatting.HelpFormatter("mpicoll")
    text = "One two\nthree.\n\n  mpicoll bench     what it\n  mpicoll bench     measures is a time\n"
    assert formatter._fill_text(text, 32, "") == (
        "One two three.\n\n  mpicoll bench     what it\n  mpicoll bench     measures is\n                    a time"
    )
