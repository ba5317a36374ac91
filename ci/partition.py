"""Two hosts with two ranks each, joined by slow links: are results right, and how do the ranks end when the hosts lose
their connection in the middle of a loop of operations? Needs root, for ci/hosts.py.

    python ci/partition.py                       everything
    python ci/partition.py training native recv  some of it

Asked is that the ranks of both sides end within 16 s of the cut, that they say which ranks they can't reach any more,
and that the launcher ends on both sides within 3 s more. `blink` is a cut of 6.5 s, over which the job has to go on.
The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import apart

_RIGHT = ("operations", "training")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*_RIGHT, "blink", *apart.LOOPS, []], help="all if left out")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set in the jobs")
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that the ranks write")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if why := apart.possible():
        raise SystemExit(f"this machine can't play hosts: {why}")
    variables = dict(one.split("=", 1) for one in arguments.env)
    failed = False
    for what in arguments.what or [*_RIGHT, "blink", *apart.LOOPS]:
        if what in (*_RIGHT, "blink"):
            begin = time.monotonic()
            done = apart.blink(**variables) if what == "blink" else apart.right(what, **variables)
            wrong = done.returncode != 0 or done.stdout.count("all right") != 4
            print(f"{what}: {'FAILED' if wrong else 'ok'}, {time.monotonic() - begin:.1f} s", flush=True)
            if wrong:
                print(done.stdout, flush=True)
            failed |= wrong
            continue
        outcome = apart.part(what, **variables)
        ends = ", ".join(f"{rank}: {seconds:.1f} s" for rank, seconds in sorted(outcome.gone.items()))
        launcher = "goes on" if outcome.launcher is None else f"{outcome.launcher:.1f} s"
        print(
            f"cut in {what}: {'FAILED' if outcome.problems else 'ok'}; ranks end {ends or 'never'}; launcher {launcher}"
        )
        for rank, line in enumerate(outcome.lines):
            print(f"    rank {rank}: {line or '-'}")
        for problem in outcome.problems:
            print(f"    {problem}")
        if outcome.problems or arguments.verbose:
            for rank, text in enumerate(outcome.said):
                print("\n".join(f"    said {rank}| {line}" for line in text.splitlines()))
        sys.stdout.flush()
        failed |= bool(outcome.problems)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
