"""The scripts of ``mpicoll completion``, run by the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mpicoll import cli
from mpicoll.cli.completion import list_commands

CASES = {
    "mpicoll ben": {"bench"},
    "mpicoll --ver": {"--version"},
    "mpicoll algorithms ": {"list", "verify", "cost", "draw"},
    "mpicoll algorithms draw bcast/ch": {"bcast/chain"},
    "mpicoll algorithms draw --out": {"--output"},
    "mpicoll bench --like ": {"numpy", "torch"},
    "mpicoll bench --like numpy bc": {"bcast"},
    "mpicoll bench --sizes ": set(),
    "mpicoll trace summary some": {"some_trace.json"},
    "mpicoll run --dry": {"--dry-run"},
    "mpicoll run some": {"some_trace.json"},
    "mpicoll completion z": {"zsh"},
}

ASK = {
    "bash": """
source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_mpicoll
printf '%s\\n' "${COMPREPLY[@]}"
""",
    # Stand-ins for the functions of zsh's completion, which exist only while somebody types.
    "zsh": """
compdef() { }
_describe() { print -l -- ${${(P)@[-1]}%%:*} | grep -- "^$PREFIX" }
_files() { print -l -- $PREFIX*(N) }
source ./script
words=("$@") CURRENT=$# PREFIX=${@[-1]}
_mpicoll
""",
    "fish": 'source ./script; complete -C "$argv" | string replace -r "\\t.*" ""',
}


@pytest.mark.parametrize("shell", list(ASK))
def test_completion(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = shutil.which(shell)
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if program is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script)
    (tmp_path / "some_trace.json").write_text("")
    (tmp_path / "ask").write_text(ASK[shell])
    for line, expected in CASES.items():
        words = [line] if shell == "fish" else line.split(" ")
        done = subprocess.run(
            [program, "ask", *words], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.stderr == "", (line, done.stderr)
        found = {word for word in done.stdout.split() if word.startswith(line.rpartition(" ")[2])}
        assert found == expected, (line, done.stdout)


def test_every_option_of_every_command_is_known() -> None:
    commands = {one.path: one for one in list_commands(cli.make_parser(()))}
    assert {path[0] for path in commands if path} == set(cli.COMMANDS)
    bench = {flag: one for one in commands["bench",].options for flag in one.flags}
    assert bench["--dtype"].takes_value
    assert not bench["--plan"].takes_value
    assert bench["--plot"].files
    assert {"list", "draw"} <= commands["algorithms",].actions.keys()
    assert all(one.text for command in commands.values() for one in command.options)
