"""README.md and the pages of docs/ are true: code runs, commands parse, links lead somewhere, tables equal the code."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest
from support.launch import ROOT
from support.scripts import run_scripts

import mpicoll
from mpicoll import cli, errors, schedules
from mpicoll.buffers.ops import OpLike
from mpicoll.config import Config
from mpicoll.engine.selection.defaults import DEFAULT_RULES, TCP_PAIR_RULES, TCP_RULES

PAGES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("[CS]*.md")))
}

OPS: dict[str, OpLike] = {"premul_sum": mpicoll.premul_sum(2)}

DTYPES = {
    "bool": ["bool"],
    "int8 to int64, uint8 to uint64": ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    "float16, bfloat16": ["float16", "bfloat16"],
    "float32, float64": ["float32", "float64"],
    "complex64, complex128": ["complex64", "complex128"],
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def printed_outputs(text: str) -> list[tuple[str, str, str]]:
    """Each Python block that is followed by its output: its code, the command and the output."""
    return re.findall(r"^```python\n([^`]*)^```\n\n```text\n\$ (.*)\n([^`]*)^```$", text, re.MULTILINE)


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose first column is headed `header`, with its header but without the line below it."""
    match = re.search(rf"^\| {re.escape(header)} \|.*?(?:\n\n|\Z)", PAGES[page], re.DOTALL | re.MULTILINE)
    assert match is not None, f"{page}: no table headed {header!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[0].strip().splitlines()]
    return [rows[0], *rows[2:]]


# Code


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [0, 3])
def test_code(size: int, tmp_path: Path) -> None:
    """The Python blocks of a page, one after the other, are a program: for any number of ranks, and without mpirun."""
    programs = []
    for page in PAGES:
        if code := blocks(page, "python"):
            programs.append(tmp_path / page.replace("/", "_").replace(".md", ".py"))
            programs[-1].write_text("\n".join(code) + 'print("reached the end")\n')
    assert len(programs) >= 7
    for program, ended in zip(
        programs, run_scripts(size, tmp_path, *([one] for one in programs), seconds=200), strict=True
    ):
        assert not any(ended.statuses), (program.name, ended)
        assert all(text.endswith("reached the end\n") for text in ended.printed), (program.name, ended)


def test_code_for_devices() -> None:
    """Blocks that need a GPU can't run here; at least they are Python."""
    code = blocks("docs/gpus.md", "py")
    assert code
    for block in code:
        compile(block, "docs/gpus.md", "exec")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [1, 4])
def test_printed_output(size: int, tmp_path: Path) -> None:
    """A text block that begins with a command shows the output of the Python block before it."""
    expected: dict[Path, str] = {}
    for code, command, output in itertools.chain.from_iterable(map(printed_outputs, PAGES.values())):
        match = re.fullmatch(r"mpirun -np ([14]) python (\w+\.py)", command)
        assert match is not None, command
        if int(match[1]) == size:
            script = tmp_path / match[2]
            script.write_text(code)
            assert script not in expected, script.name
            expected[script] = output
    assert expected
    ends = run_scripts(size, tmp_path, *([script] for script in expected), seconds=200)
    for (script, output), ended in zip(expected.items(), ends, strict=True):
        assert [line.rstrip() for line in ended.output.splitlines()] == output.splitlines(), script.name


def test_comments() -> None:
    """What the comments in the code say."""
    cost = schedules.cost("allreduce/ring", 100)
    assert f"cost.rounds is {cost.rounds}, cost.sent is {cost.sent!r}" in PAGES["docs/algorithms.md"]
    sums = mpicoll.run_local(lambda: mpicoll.scan(mpicoll.world().rank + 1), 4)
    assert f"# {sums}" in PAGES["docs/faults.md"]


def test_message_of_a_mismatch() -> None:
    """The comment below a call that ranks disagree about is the message, with parts left out."""
    first, *_ = blocks("docs/faults.md", "python")
    block = next(block for block in blocks("docs/faults.md", "python") if "MismatchError" in block)
    names: dict[str, list[str]] = {}
    exec(first + block, names)
    shown = " ".join(line[2:].strip() for line in block.splitlines() if line.startswith("# "))
    parts = [re.escape(part.strip()) for part in re.sub(r"at train\.py:\d+ in program", "...", shown).split("...")]
    message = " ".join(names["messages"][0].split())
    assert re.match(r".*?".join(part for part in parts if part), message), (parts, message)


def test_picture() -> None:
    lines = [line.rstrip() for line in schedules.draw("allreduce/ring", 3).splitlines()]
    assert "\n".join(lines).strip() in PAGES["docs/algorithms.md"]


# Commands


def shell_lines() -> Iterator[tuple[str, str]]:
    """Each command of the pages: lines of shell blocks and of sessions, and commands in the text."""
    for page, text in PAGES.items():
        for block in blocks(page, "(?:sh|bash)"):
            yield from ((page, line) for line in block.splitlines() if line.strip() and not line.startswith("#"))
        yield from ((page, line) for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE))
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            if (
                re.match(r"(\w+=\S+ )*(mpirun|mpicoll|python|pip|ci/[\w.]+\.sh)( |$)", code)
                and code != "mpicoll COMMAND --help"
            ):
                yield page, code


def rejects(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    try:
        parser.parse_args(words)
    except SystemExit as leaving:
        return leaving.code != 0
    return False


def parser_of(script: Path) -> argparse.ArgumentParser:
    """A parser with the options that a script of the repository adds to its own; without it being run."""
    parser = argparse.ArgumentParser()
    for call in ast.walk(ast.parse(script.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = [ast.literal_eval(name) for name in call.args]
            options = {
                one.arg: one.value for one in call.keywords if one.arg in ("action", "nargs", "required", "choices")
            }
            known = {}
            for name, value in options.items():
                if isinstance(value, ast.Attribute):
                    known[name] = getattr(argparse, value.attr)
                elif not any(isinstance(part, ast.Starred | ast.Name) for part in ast.walk(value)):
                    known[name] = ast.literal_eval(value)
            parser.add_argument(*names, **known)
    return parser


def check_command(words: list[str], page: str) -> None:
    """Raise AssertionError if a command names a program, a file, a sub-command or an option that is not there."""
    while "=" in words[0] and not words[0].startswith("-"):
        name = words.pop(0).partition("=")[0]
        assert not name.startswith("MPICOLL_") or name in documented_variables(), name
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program == "mpirun":
        options = argparse.ArgumentParser(prog="mpirun")
        options.add_argument("-np", type=int)
        options.add_argument("--with-ft", choices=["ulfm"])
        options.add_argument("--oversubscribe", action="store_true")
        options.add_argument("--allow-run-as-root", action="store_true")
        options.add_argument("program", nargs=argparse.REMAINDER)
        assert not rejects(options, rest), words
        if inner := options.parse_args(rest).program:
            check_command(inner, page)
    elif program == "mpicoll":
        if len(rest) == 1:
            rest.append("--help")  # the name of a command; it may need more to be one
        assert not rest or not rejects(cli.make_parser(rest), rest), words
    elif program in ("python", "python3", "torchrun"):
        check_python([word for word in rest if not word.startswith("--nproc-per-node=")], page)
    elif program in ("sudo", "srun", "sbatch", "ci/slurm.sh"):
        check_slurm_command(program, rest, page)
    elif program.startswith("ci/"):
        check_shell_script(ROOT / program, rest)
    elif program in ("source", "pre-commit", "git", "docker", "apptainer", "pip", "mkdir", "cd", "ln", "export"):
        for word in rest:
            if re.match(r"(ci|docs|tests|examples)/", word):
                assert (ROOT / word).exists(), words
    else:
        raise AssertionError(f"this test doesn't know how to check {program!r}")


def check_slurm_command(program: str, words: list[str], page: str) -> None:
    assert program != "ci/slurm.sh" or os.access(ROOT / program, os.X_OK), program
    inner = list(itertools.dropwhile(lambda word: word.startswith("-"), words))
    if program == "sbatch":
        assert (ROOT / inner[0]).exists(), words
    elif inner:
        check_command(inner, page)


def check_python(words: list[str], page: str) -> None:
    if not words:
        return
    # From the folder of the tutorial's programs.
    words[0] = words[0].removeprefix("../../")
    if words[0] == "-m":
        assert words[1] in ("mpicoll", "pytest", "venv"), words
        if words[1] == "mpicoll":
            check_command(words[1:], page)
        else:
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words
    elif words[0].startswith(("ci/", "examples/")):
        script = ROOT / words[0]
        parser = parser_of(script)
        assert not rejects(parser, words[1:]), words
        if words[0] == "ci/hosts.py":
            check_command(parser.parse_args(words[1:]).program, page)
    elif words[0] == "setup.py":
        assert words[1:] == ["build_ext", "--inplace"], words
    elif not words[0].startswith("-"):
        shown = any(command.endswith(f" {words[0]}") for _, command, _ in printed_outputs(PAGES[page]))
        assert shown or f"Save this as `{words[0]}`" in PAGES[page], words


def check_shell_script(script: Path, words: list[str]) -> None:
    """The usage of a script, which is in its text, has the words that are passed to it."""
    assert os.access(script, os.X_OK), script
    usage = "".join(re.findall(r"usage: \$0 ?(.*?)\"", script.read_text()))
    for word in words:
        named = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", usage)
        assert named or re.fullmatch(r"[\d.]+", word), f"{script.name} {word}: the usage is {usage!r}"


def documented_variables() -> set[str]:
    return {row[0].strip("`") for row in table("docs/environment.md", "variable")[1:]}


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    commands = list(shell_lines())
    assert len(commands) > 60
    wrong = []
    for page, line in commands:
        if words := [word for word in shlex.split(line, comments=True) if word != "..."]:
            try:
                check_command(words, page)
            except AssertionError as error:
                wrong.append(f"{page}: {line}: {error or capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "mpicoll bench --seize 8",
        "mpicoll benhc",
        "mpicoll algorithms verify --ranks none",
        "mpirun -np two python examples/digits.py",
        "mpirun -np 2 python examples/no_such.py",
        "mpirun -np 2 python examples/digits.py --epoch-count 3",
        "python ci/hosts.py --rate 1gbit 2 mpicoll bench",
        "python ci/hosts.py --rate 1gbit 2 2 mpicoll bench --seize 8",
        "ci/test.sh unti",
        "MPICOLL_CHEKC=1 mpirun -np 2 python examples/digits.py",
        "source ci/environment.sh",
        "sudo ci/slurm.sh srun --mpi=pmix python examples/no_such.py",
        "sbatch examples/slurm/no_such.sbatch",
        "nosuchprogram",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        check_command(shlex.split(line), "README.md")


def test_hooks() -> None:
    """The hooks of pre-commit are the commands of ci/test.sh, but that the formatter also changes files."""
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    stages = re.findall(r"^ *check \w+ \d+ (.*)$", (ROOT / "ci" / "test.sh").read_text(), re.MULTILINE)
    assert len(hooks) >= 6
    assert not set(hooks) - {stage.replace("format --check", "format") for stage in stages}


# Links and names


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links() -> None:
    """Links lead to files and headings that exist."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            file = ROOT / page if not path else (ROOT / page).parent / path
            found = file.exists() and (not anchor or anchor in anchors(file.read_text()))
            if not found and not target.startswith("https://"):
                broken.append(f"{page}: {target}")
    assert not broken


def test_every_page_can_be_found() -> None:
    for index, folder in (("README.md", "docs/"), ("docs/index.md", "")):
        missing = [page for page in PAGES if page.startswith("docs/") and page != "docs/index.md"]
        missing = [page for page in missing if f"]({folder}{Path(page).name})" not in PAGES[index]]
        assert not missing, index


def test_named_files() -> None:
    """Files that a page names exist; the changelog also names files of the past."""
    pattern = r"`((?:mpicoll|tests|ci|examples|docs)/[\w/.-]*)`"
    named = {(page, path) for page, text in PAGES.items() for path in re.findall(pattern, text)}
    assert len(named) > 30
    assert not [one for one in named if one[0] != "CHANGELOG.md" and not (ROOT / one[1]).exists()]


def test_width_of_the_changelog() -> None:
    lines = PAGES["CHANGELOG.md"].splitlines()
    assert not [(number, line) for number, line in enumerate(lines, 1) if len(line) > 120]


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 12 * 1024


def test_extras() -> None:
    """Whatever a page, the package or an example tells a reader to install is there."""
    files = [file for folder in ("mpicoll", "examples") for file in (ROOT / folder).rglob("*.py")]
    texts = PAGES | {str(file): file.read_text() for file in files}
    named = {
        extra.strip(): file
        for file, text in texts.items()
        for extras in re.findall(r"(?:mpicoll|(?:install|-e) ['\"]?\.)\[([\w, ]+)\]", text)
        for extra in extras.split(",")
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    assert {"openmpi", "cuda13"} <= named.keys() & extras
    assert not {extra: file for extra, file in named.items() if extra not in extras}


# Tables


def test_reductions() -> None:
    """The table of dtypes and operations is what the library takes and refuses."""
    pytest.importorskip("ml_dtypes")  # numpy knows bfloat16 by name after that
    (_, *heads), *rows = table("docs/operations.md", "dtype")
    assert [row[0] for row in rows] == list(DTYPES)
    for name, *cells in rows:
        for head, cell in zip(heads, cells, strict=True):
            for dtype in DTYPES[name]:
                for op in head.split(", "):
                    assert accepts(op, dtype) == (cell == "yes"), f"{op} of {dtype}"


def accepts(op: str, dtype: str) -> bool:
    return not raises(errors.DTypeError, lambda: mpicoll.explain("allreduce", 8, op=OPS.get(op, op), dtype=dtype))


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def test_algorithms() -> None:
    listed = {
        (collective, name)
        for collectives, names in table("docs/algorithms.md", "collective")[1:]
        for collective in collectives.split(", ")
        for name in names.split(", ")
    }
    assert listed == {(one, name) for one in schedules.collectives() for name in schedules.algorithms_of(one)}


def test_default_rules() -> None:
    shown = [block.splitlines() for block in blocks("docs/algorithms.md", "text")]
    assert all(rules.split(";") in shown for rules in (DEFAULT_RULES, TCP_RULES, TCP_PAIR_RULES))


def test_errors() -> None:
    """Each exception is there, with the built-in exception that it is, too."""
    rows = table("docs/faults.md", "exception")[1:]
    listed = dict(re.findall(r"`(\w+)`(?: \(an? `(\w+)`\))?", "\n".join(row[0] for row in rows)))
    classes = {name: getattr(errors, name) for name in errors.__all__ if name != "MpicollError"}
    assert listed == {
        name: next((base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"), "")
        for name, kind in classes.items()
    }


def test_environment_variables() -> None:
    """The table of the page is the one of mpicoll.config, and no page names another variable."""
    rows = [
        [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in row]
        for row in table("docs/environment.md", "variable")
    ]
    assert rows[1:] == config_table()
    named = set(re.findall(r"MPICOLL_\w+", "\n".join(PAGES.values())))
    assert named == {row[0].strip("`") for row in rows[1:]}


def config_table() -> list[list[str]]:
    """Name, meaning and default of each variable in the docstring of Config."""
    text = inspect.getdoc(Config) or ""
    items = re.findall(r"^``(MPICOLL_\w+)`` \((.*)\)\n((?: {4}.*(?:\n|$))+)", text, re.MULTILINE)
    cells = [[f"`{name}`", " ".join(meaning.split()), default] for name, default, meaning in items]
    return [[cell.replace("``", "`") for cell in row] for row in cells]


def test_operations() -> None:
    """Every operation has the three forms that the page names, and takes the arguments that the page shows."""
    tables = re.findall(r"^\| (`.*?) \|", PAGES["docs/operations.md"], re.MULTILINE)
    text = re.findall(r"`(\w+_object\(.*?\))`", PAGES["docs/operations.md"])
    calls = [ast.parse(code, mode="eval").body for code in [*re.findall(r"`(\w+\(.*?\))`", " ".join(tables)), *text]]
    shown = {call.func.id: call for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    assert set(schedules.collectives()) | {"send", "recv", "sendrecv", "scatter_object"} <= set(shown)
    for name, call in shown.items():
        if name in mpicoll.__all__:
            parameters = inspect.signature(getattr(mpicoll, name)).parameters
            assert [ast.unparse(one) for one in call.args] == list(parameters)[: len(call.args)]
            for option in call.keywords:
                assert option.arg is not None
                assert parameters[option.arg].default == ast.literal_eval(option.value), (name, option.arg)
        if name in schedules.collectives():
            assert {name, f"i{name}", f"{name}_init"} <= set(mpicoll.__all__)
            assert {"comm", "timeout", "algorithm"} <= set(inspect.signature(getattr(mpicoll, name)).parameters)


def test_layers() -> None:
    """The layers of the page are those of the contract, and each of them is in the table of paths."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "Layers")
    shown = [line.replace("(", "").replace(")", "") for line in layers if "__main__" not in line]
    assert shown in [block.splitlines() for block in blocks("docs/architecture.md", "text")]
