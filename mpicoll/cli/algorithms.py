"""``mpicoll algorithms``: list the schedules, prove them correct, count what they cost, and draw them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from mpicoll import schedules
from mpicoll.cli import formatting
from mpicoll.errors import AlgorithmError, ArgumentError, ScheduleError
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
    formatting.add_json(every)
    every.set_defaults(action=_list)
    verify = actions.add_parser("verify", help="prove algorithms correct for numbers of ranks; status 1 if one is not")
    verify.add_argument("name", nargs="?", metavar="COLLECTIVE[/NAME]", help="default: all")
    verify.add_argument("--ranks", type=_ranks, default="1-17", metavar="1-33|2,4,8", help="default: 1-17")
    formatting.add_json(verify)
    verify.set_defaults(action=_verify)
    cost = actions.add_parser("cost", help="exact counts beside the closed forms")
    draw = actions.add_parser("draw", help="a picture, as text here or into a file")
    for action, what in ((cost, _cost), (draw, _draw)):
        action.add_argument("name", metavar="COLLECTIVE/NAME")
        action.add_argument(
            "--ranks", type=_ranks, required=True, metavar="P", help="numbers of ranks, such as 4 or 2,4,8"
        )
        action.add_argument("--root", type=int, default=0, metavar="RANK", help="default: 0")
        action.add_argument("--segments", type=int, default=1, help="pieces of a pipeline; default: 1")
        action.set_defaults(action=what)
    formatting.add_json(cost)
    draw.add_argument("-o", "--output", metavar="FILE", help="such as .png, .svg, .pdf or .txt")
    draw.add_argument("--animate", action="store_true", help="a picture that moves, for browsers: an .svg file")
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
    if args.json is not None:
        formatting.write_json(args.json, {"algorithms": [_describe(algorithm) for algorithm in chosen]})
        if args.json == "-":
            return 0
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
        console.print(formatting.fold(text, console.width))
    return 0


def _describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm as JSON has it. `rounds` and `sent`, a multiple of n, are functions of P and S."""
    names = ("collective", "name", "rounds", "sent", "segmented", "uneven", "ordered", "any_root", "doc")
    return {name: getattr(algorithm, name) for name in names}


def _doc(algorithm: Algorithm) -> str:
    """Return the first paragraph of the docstring, and the first sentence after it with a year, which is the source."""
    first, *rest = algorithm.doc.split("\n\n")
    source = re.search(r"[A-Z][^.;]*\b(?:19|20)\d\d\b[^.]*", " ".join(" ".join(rest).split()))
    return " ".join(first.split()) + (f" {source[0]}." if source else "")


def _verify(args: argparse.Namespace) -> int:
    console = formatting.console()
    chosen = _find_algorithms(args.name)
    with formatting.steps(formatting.shows_progress(args.json), len(chosen) * len(args.ranks), measures=False) as step:
        found = [_verify_one(algorithm, args.ranks, step) for algorithm in chosen]
    failed = [text for one in found for text in one.errors]
    if args.json is not None:
        formatting.write_json(args.json, {"ranks": args.ranks, "algorithms": [one.describe() for one in found]})
        if args.json == "-":
            return 1 if failed else 0
    rows = [
        [
            _full(one.algorithm),
            f"{len(one.right)} of {len(args.ranks)}",
            str(one.messages),
            "yes" if one.ordered and one.right else "",
            "wrong" if one.errors else "correct",
        ]
        for one in found
    ]
    span = f"{args.ranks[0]} to {args.ranks[-1]} ranks" if len(args.ranks) > 1 else f"{args.ranks[0]} ranks"
    columns = ["algorithm", "numbers of ranks", "messages followed", "in order", "outcome"]
    console.print(formatting.table(f"verified on {span}", columns, rows))
    for text in failed:
        console.print(text)
    return 1 if failed else 0


@dataclass(slots=True)
class _Verified:
    """The numbers of ranks for which an algorithm is right, the messages that were followed, and errors for others."""

    algorithm: Algorithm
    right: list[int] = field(default_factory=list)
    messages: int = 0
    ordered: bool = True
    errors: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "collective": self.algorithm.collective,
            "name": self.algorithm.name,
            "correct": not self.errors,
            "correct_ranks": self.right,
            "messages": self.messages,
            "ordered": self.ordered and bool(self.right),
            "errors": self.errors,
        }


def _verify_one(algorithm: Algorithm, sizes: list[int], step: Callable[[str, int], None]) -> _Verified:
    found = _Verified(algorithm)
    for size in sizes:
        step(f"{_full(algorithm)}, {size} ranks", 0)
        try:
            report = schedules.verify(algorithm, size)
        except ScheduleError as error:
            found.errors.append(str(error))
        else:
            found.right.append(size)
            found.messages += report.messages
            found.ordered = found.ordered and report.ordered
        step(_full(algorithm), 1)
    return found


def _cost(args: argparse.Namespace) -> int:
    algorithm = schedules.find(args.name)
    console = formatting.console()
    costs = [schedules.cost(algorithm, size, args.root, args.segments) for size in args.ranks]
    forms = [schedules.closed_form(algorithm, size, args.segments) for size in args.ranks]
    if args.json is not None:
        formatting.write_json(
            args.json,
            {
                **_describe(algorithm),
                "root": args.root,
                "segments": args.segments,
                "costs": [
                    {
                        "ranks": size,
                        "closed_form": {"rounds": form[0], "sent": _encode(form[1])},
                        "counted": {name: _encode(value) for name, value in asdict(counted).items()},
                    }
                    for size, counted, form in zip(args.ranks, costs, forms, strict=True)
                ],
            },
        )
        if args.json == "-":
            return 0
    for size, counted, (rounds, sent) in zip(args.ranks, costs, forms, strict=True):
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


def _encode(value: Any) -> Any:
    """Return a fraction, a multiple of n, as text, and whole numbers as they are."""
    return str(value) if isinstance(value, Fraction) else value


def _draw(args: argparse.Namespace) -> int:
    from pathlib import Path

    algorithm = schedules.find(args.name)
    if len(args.ranks) != 1:
        raise AlgorithmError(f"a picture is of one number of ranks, not of {len(args.ranks)}; give --ranks P")
    if args.animate:
        if args.output is None or not args.output.lower().endswith(".svg"):
            raise ArgumentError(f"--animate: a picture that moves is an SVG file, not {args.output}; give -o FILE.svg")
        Path(args.output).write_text(schedules.animate(algorithm, args.ranks[0], args.root, args.segments))
        return 0
    asks_text = args.output is not None and args.output.endswith(".txt")
    file = None if asks_text else args.output
    width = None if asks_text else formatting.text_width(formatting.terminal_width())
    text = schedules.draw(algorithm, args.ranks[0], args.root, args.segments, file, width=width)
    if asks_text:
        Path(args.output).write_text(text + "\n")
    elif file is None:
        print(text)
    return 0
