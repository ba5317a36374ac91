"""``mpicoll algorithms``: list the schedules, prove them correct, count what they cost, and draw them."""

from __future__ import annotations

import argparse
import re
from typing import Any

from mpicoll import schedules
from mpicoll.cli import formatting
from mpicoll.errors import AlgorithmError, ScheduleError
from mpicoll.schedules import Algorithm


def add(commands: Any) -> None:
    """Add the parsers of this command."""
    parser = commands.add_parser(
        "algorithms",
        help="list, verify, count and draw the schedules",
        description="Look at the schedules: which there are, whether they are correct, what they cost, what they do.",
    )
    actions = parser.add_subparsers(title="what to do", required=True, metavar="ACTION")
    every = actions.add_parser("list", help="the algorithms with their closed forms")
    every.add_argument("collective", nargs="?", help="default: all")
    every.set_defaults(action=_list)
    verify = actions.add_parser("verify", help="prove algorithms correct for numbers of ranks; status 1 if one is not")
    verify.add_argument("name", nargs="?", metavar="COLLECTIVE[/NAME]", help="default: all")
    verify.add_argument("--ranks", type=_ranks, default="1-17", metavar="1-33|2,4,8", help="default: 1-17")
    verify.set_defaults(action=_verify)
    cost = actions.add_parser("cost", help="exact counts beside the closed forms")
    draw = actions.add_parser("draw", help="a picture, as text here or into a file")
    for action, what in ((cost, _cost), (draw, _draw)):
        action.add_argument("name", metavar="COLLECTIVE/NAME")
        action.add_argument("--ranks", type=_ranks, required=True, metavar="P")
        action.add_argument("--root", type=int, default=0)
        action.add_argument("--segments", type=int, default=1, help="pieces of a pipeline; default: 1")
        action.set_defaults(action=what)
    draw.add_argument("-o", "--output", metavar="FILE", help="such as .png, .svg, .pdf or .txt")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the requested action; return 1 if an algorithm is not correct."""
    return int(args.action(args))


def _ranks(text: str) -> list[int]:
    """Parse ``1-33``, ``2,4,8`` or a mixture of both."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise argparse.ArgumentTypeError(f"{text!r} are no numbers of ranks; write such as 4, 1-33 or 2,4,8")
        found.update(range(low, high + 1))
    return sorted(found)


def _find_algorithms(name: str | None) -> list[Algorithm]:
    """Return all algorithms, those of a collective, or the one of a ``collective/name``. Raise AlgorithmError."""
    if name is not None and "/" in name:
        return [schedules.find(name)]
    if name is not None and name not in schedules.collectives():
        raise AlgorithmError(f"no collective {name!r}; there are {', '.join(schedules.collectives())}")
    wanted = schedules.collectives() if name is None else (name,)
    return [algorithm for one in wanted for algorithm in schedules.algorithms_of(one).values()]


def _full(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}/{algorithm.name}"


def _list(args: argparse.Namespace) -> int:
    console = formatting.console()
    chosen = _find_algorithms(args.collective)
    rows = [
        [
            _full(algorithm),
            algorithm.rounds,
            "yes" if algorithm.segmented else "",
            "" if algorithm.uneven else "equal only",
            "any root" if algorithm.ordered and algorithm.any_root else "yes" if algorithm.ordered else "",
        ]
        for algorithm in chosen
    ]
    columns = ["algorithm", "rounds", "segments", "blocks", "keeps order"]
    caption = (
        "P ranks, S segments, lg = ceil(log2 P), p2 = the largest power of two up to P, r = P - p2,"
        " n = bytes of the vector or of all blocks of one buffer"
    )
    console.print(formatting.table("schedules", columns, rows, caption=caption))
    for algorithm in chosen:
        text = f"{_full(algorithm)}: {_doc(algorithm)} The busiest rank sends n times {algorithm.sent}."
        console.print(text)
    return 0


def _doc(algorithm: Algorithm) -> str:
    """Return the first paragraph of the docstring, and the first sentence after it with a year, which is the source."""
    first, *rest = algorithm.doc.split("\n\n")
    source = re.search(r"[A-Z][^.;]*\b(?:19|20)\d\d\b[^.]*", " ".join(" ".join(rest).split()))
    return " ".join(first.split()) + (f" {source[0]}." if source else "")


def _verify(args: argparse.Namespace) -> int:
    console = formatting.console()
    rows: list[list[str]] = []
    failed: list[str] = []
    for algorithm in _find_algorithms(args.name):
        right, messages, ordered = [], 0, True
        errors: list[str] = []
        for size in args.ranks:
            try:
                report = schedules.verify(algorithm, size)
            except ScheduleError as error:
                errors.append(str(error))
            else:
                right.append(size)
                messages += report.messages
                ordered = ordered and report.ordered
        failed += errors
        rows.append(
            [
                _full(algorithm),
                f"{len(right)} of {len(args.ranks)}",
                str(messages),
                "yes" if ordered and right else "",
                "wrong" if errors else "correct",
            ]
        )
    span = f"{args.ranks[0]} to {args.ranks[-1]} ranks" if len(args.ranks) > 1 else f"{args.ranks[0]} ranks"
    columns = ["algorithm", "numbers of ranks", "messages followed", "in order", "outcome"]
    console.print(formatting.table(f"verified on {span}", columns, rows))
    for text in failed:
        console.print(text)
    return 1 if failed else 0


def _cost(args: argparse.Namespace) -> int:
    algorithm = schedules.find(args.name)
    console = formatting.console()
    for size in args.ranks:
        counted = schedules.cost(algorithm, size, args.root, args.segments)
        rounds, sent = schedules.closed_form(algorithm, size, args.segments)
        rows = [
            ["rounds on the critical path", str(counted.rounds), f"{rounds} = {algorithm.rounds}"],
            ["sent by the busiest rank", f"{counted.sent} n", f"{sent} n = {algorithm.sent}"],
            ["received by the busiest rank", f"{counted.received} n", ""],
            ["reduced by the busiest rank", f"{counted.reduced} n", ""],
            ["messages of all ranks", str(counted.messages), ""],
            ["sent by all ranks", f"{counted.total_sent} n", ""],
            ["reduced by all ranks", f"{counted.total_reduced} n", ""],
        ]
        segments = f", {args.segments} segments" if algorithm.segmented else ""
        columns = ["", "counted", "closed form, root 0"]
        console.print(formatting.table(f"{_full(algorithm)} on {size} ranks{segments}", columns, rows))
    return 0


def _draw(args: argparse.Namespace) -> int:
    from pathlib import Path

    algorithm = schedules.find(args.name)
    if len(args.ranks) != 1:
        raise AlgorithmError(f"a picture is of one number of ranks, not of {len(args.ranks)}; give --ranks P")
    asks_text = args.output is not None and args.output.endswith(".txt")
    file = None if asks_text else args.output
    text = schedules.draw(algorithm, args.ranks[0], args.root, args.segments, file)
    if asks_text:
        Path(args.output).write_text(text + "\n")
    elif file is None:
        print(text)
    return 0
