"""``mpicoll completion``: print a script with which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicoll.cli import formatting

_DESCRIPTION = """\
Print the script by which a shell completes mpicoll's commands, options and their values with the Tab key. For bash, add
this line to ~/.bashrc:

  eval "$(mpicoll completion bash)"

For fish, and for zsh, write the script to a file:

  mpicoll completion fish > ~/.config/fish/completions/mpicoll.fish
  mpicoll completion zsh > "${fpath[1]}/_mpicoll"
"""

_FILES = ("FILE", "DIR", "DIR_OR_FILE")
"""Names of arguments that are files, beside those of type Path."""

_HELP_WIDTH = 70
"""Characters of a description from which on it is cut."""


def add(commands: Any) -> None:
    """Add the parser of this command."""
    parser = commands.add_parser(
        "completion",
        help="print a script for completion by bash, zsh or fish",
        description=_DESCRIPTION,
        formatter_class=formatting.HelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(_WRITERS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from mpicoll.cli import make_parser

    commands = list(list_commands(make_parser(())))
    sys.stdout.write("\n".join(_WRITERS[args.shell](commands)) + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class Argument:
    """An option with its `flags`, or a positional argument without any. `words` are its known values; `files`: it is a
    file."""

    flags: tuple[str, ...]
    text: str
    takes_value: bool
    words: tuple[str, ...] = ()
    files: bool = False


@dataclass(slots=True)
class Command:
    """A command, such as ``("trace", "summary")``, with its arguments and its sub-commands with their descriptions."""

    path: tuple[str, ...]
    arguments: list[Argument] = field(default_factory=list)
    actions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The path as the scripts have it: a blank before each word."""
        return "".join(f" {word}" for word in self.path)

    @property
    def options(self) -> list[Argument]:
        return [one for one in self.arguments if one.flags]

    @property
    def positionals(self) -> list[Argument]:
        return [one for one in self.arguments if not one.flags]

    @property
    def words(self) -> dict[str, str]:
        """Sub-commands and known values of positional arguments, with descriptions."""
        return self.actions | {word: "" for one in self.positionals for word in one.words}

    @property
    def files(self) -> bool:
        return any(one.files for one in self.positionals)


def list_commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yield the command of `parser`, then its sub-commands."""
    if path == ("run",):
        # The parser of its words has no options; see there.
        from mpicoll.cli.run import make_own_parser

        options = [_describe(one) for one in make_own_parser()._actions]  # noqa: SLF001  it has no public name
        yield Command(path, [*options, Argument((), "", takes_value=True, files=True)])
        return
    command = Command(path)
    children: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            children |= action.choices
            command.actions |= {one.dest: _shorten(one.help) for one in action._choices_actions}  # noqa: SLF001
        else:
            command.arguments.append(_describe(action))
    yield command
    for name, child in children.items():
        yield from list_commands(child, (*path, name))


def _describe(action: argparse.Action) -> Argument:
    files = action.metavar in _FILES or action.type is Path
    words = tuple(map(str, action.choices or _list_values(action.metavar or action.dest)))
    return Argument(tuple(action.option_strings), _shorten(action.help), action.nargs != 0, words, files)


def _list_values(name: Any) -> Sequence[str]:
    """Return the values of a positional argument that are known, by its name in the help."""
    from mpicoll import schedules

    collectives = schedules.collectives()
    if name in ("COLLECTIVE", "collective"):
        return tuple(collectives)
    if name in ("COLLECTIVE/NAME", "COLLECTIVE[/NAME]"):
        return [f"{one}/{name}" for one in collectives for name in schedules.algorithms_of(one)]
    return ()


def _shorten(text: str | None) -> str:
    """Return the beginning of a description."""
    first = " ".join((text or "").replace("%%", "%").split()).partition(";")[0]
    return first if len(first) <= _HELP_WIDTH else first[: _HELP_WIDTH - 1].rpartition(" ")[0] + "…"


def _flags(options: Sequence[Argument]) -> list[str]:
    return [flag for one in options for flag in one.flags]


def _patterns(key: str, flags: Sequence[str]) -> str:
    """Return the pattern of a case: any of the `flags` after the command of `key`."""
    return "|".join(f'"{key} {flag}"' for flag in flags)


def _write_path(commands: Sequence[Command], words: str) -> Iterator[str]:
    """Yield the loop of bash and zsh that finds out in which command the cursor is."""
    known = "|".join(f'"{one.key}"' for one in commands if one.path)
    yield f"    for word in {words}; do"
    yield f'        case "$at $word" in {known}) at="$at $word" ;; esac'
    yield "    done"


def _write_bash(commands: Sequence[Command]) -> Iterator[str]:
    yield "# Completion of mpicoll for bash; made by `mpicoll completion bash`."
    yield "_mpicoll() {"
    yield "    local at= word options= words= files="
    yield "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}"
    yield from _write_path(commands, '"${COMP_WORDS[@]:1:COMP_CWORD-1}"')
    yield '    case "$at" in'
    for one in commands:
        options, words = shlex.quote(" ".join(_flags(one.options))), shlex.quote(" ".join(one.words))
        yield f'        "{one.key}") options={options} words={words} files={"1" if one.files else ""} ;;'
    yield "    esac"
    yield '    [[ $current == -* ]] || case "$at $previous" in'
    for one in commands:
        for option in one.options:
            if option.takes_value:
                words, files = shlex.quote(" ".join(option.words)), "1" if option.files else ""
                yield f"        {_patterns(one.key, option.flags)}) words={words} files={files} ;;"
    yield "    esac"
    yield "    [[ $current == -* ]] && words=$options files="
    yield '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")'
    yield "    if [[ $files ]]; then"
    yield "        compopt -o filenames 2>/dev/null"
    yield '        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")'
    yield "    fi"
    yield "}"
    yield "complete -F _mpicoll mpicoll"


def _write_zsh(commands: Sequence[Command]) -> Iterator[str]:
    def listed(words: dict[str, str]) -> str:
        return " ".join(shlex.quote(f"{word}:{text}" if text else word) for word, text in words.items())

    yield "#compdef mpicoll"
    yield "# Completion of mpicoll for zsh; made by `mpicoll completion zsh`."
    yield "_mpicoll() {"
    yield "    local at= word files="
    yield "    local -a options candidates"
    yield "    local previous=$words[CURRENT-1]"
    yield from _write_path(commands, "$words[2,CURRENT-1]")
    yield '    case "$at" in'
    for one in commands:
        options = {flag: option.text for option in one.options for flag in option.flags}
        files = "1" if one.files else ""
        yield f'        "{one.key}") options=({listed(options)}) candidates=({listed(one.words)}) files={files} ;;'
    yield "    esac"
    yield '    [[ $PREFIX == -* ]] || case "$at $previous" in'
    for one in commands:
        for option in one.options:
            if option.takes_value:
                words, files = listed(dict.fromkeys(option.words, "")), "1" if option.files else ""
                yield f"        {_patterns(one.key, option.flags)}) candidates=({words}) files={files} ;;"
    yield "    esac"
    yield "    if [[ $PREFIX == -* ]]; then"
    yield "        _describe -o option options"
    yield "        return"
    yield "    fi"
    yield "    (( $#candidates )) && _describe word candidates"
    yield "    [[ -n $files ]] && _files"
    yield "}"
    yield 'if [[ $funcstack[1] == _mpicoll ]]; then _mpicoll "$@"; else compdef _mpicoll mpicoll; fi'


def _write_fish(commands: Sequence[Command]) -> Iterator[str]:
    yield "# Completion of mpicoll for fish; made by `mpicoll completion fish`."
    yield "function __mpicoll_at"
    yield "    set -l at"
    yield "    for word in (commandline -opc)[2..]"
    yield f'        if contains -- "$at $word" {" ".join(shlex.quote(one.key) for one in commands if one.path)}'
    yield '            set at "$at $word"'
    yield "        end"
    yield "    end"
    yield '    test "$at" = "$argv[1]"'
    yield "end"
    yield "complete -c mpicoll -f"
    for one in commands:
        begin = f"complete -c mpicoll -n '__mpicoll_at \"{one.key}\"'"
        for word, text in one.words.items():
            yield f"{begin} -a {_quote_fish(word)}" + (f" -d {_quote_fish(text)}" if text else "")
        if one.files:
            yield f"{begin} -F"
        for option in one.options:
            named = []
            for flag in option.flags:
                kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
                named.append(f"{kind} {flag.lstrip('-')}")
            value = ""
            if option.takes_value:
                value = " -r -F" if option.files else " -x"
                value += f" -a {_quote_fish(' '.join(option.words))}" if option.words else ""
            yield f"{begin} {' '.join(named)}{value} -d {_quote_fish(option.text)}"


def _quote_fish(text: str) -> str:
    """Quote a word for fish, in which a backslash escapes a quote within quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_WRITERS = {"bash": _write_bash, "zsh": _write_zsh, "fish": _write_fish}
