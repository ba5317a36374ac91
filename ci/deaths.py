"""The matrix of deaths: one rank of a job dies, by every kind of death at every moment; do the others end as they must?

    python ci/deaths.py                              all cases, one after the other: some 500 jobs
    python ci/deaths.py --only "KILL|TERM" --only "native.*/3"     those whose names match all of these
    python ci/deaths.py --only " native.*1/3" --times 5            how long a job lasts after each kind of death
    python ci/deaths.py --list
    python ci/deaths.py --hosts 2,1 --only "/3"      jobs on hosts of ci/hosts.py with so many ranks on each
    python ci/deaths.py --ulfm --times 20            jobs with MPI's fault tolerance, in which the others continue;
                                                     with --hosts 2,2 on several hosts

A case is named by the kind of death, the moment, the victim and the number of ranks, such as `KILL in-shared 2/3`. Of
each job is asked that it is over within 10 s of the death, with an exit status other than 0; that mpicoll's first line
says which rank died of what; and that no process and no file of it is left. What Open MPI itself leaves is counted
apart. In the end, the time from the death to the end of mpirun, and to that of the last process, is listed by the kind
of death. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hosts import parse_numbers
from support import dying, survivors


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="REGEX", help="may be given several times")
    parser.add_argument("--list", action="store_true", help="name the cases instead of running them")
    parser.add_argument("--ulfm", action="store_true", help="jobs with MPI's fault tolerance (ULFM)")
    parser.add_argument("--hosts", type=parse_numbers, default=[], metavar="RANKS", help="on each host, such as 2,1")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="run each case N times")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set in the jobs")
    return parser.parse_args()


def _run_ulfm(arguments: argparse.Namespace) -> NoReturn:
    """Run the jobs in which ranks survive, and exit."""
    cases = [case for case in survivors.matrix() if all(re.search(one, str(case)) for one in arguments.only)]
    if arguments.list:
        print(*cases, sep="\n")
        raise SystemExit
    failed = 0
    for case in cases:
        problems: list[str] = []
        longest = 0.0
        for _ in range(arguments.times):
            begin = time.monotonic()
            done = survivors.run(case, arguments.hosts)
            longest = max(longest, time.monotonic() - begin)
            problem = survivors.find_problem(case, done)
            if problem:
                problems.append(problem)
                print("\n".join(f"    {line}" for line in done.stdout.splitlines()), flush=True)
        failed += len(problems)
        passed = arguments.times - len(problems)
        print(f"{case!s:20} {passed}/{arguments.times}, at most {longest:.1f} s  {'; '.join(problems)}", flush=True)
    print(f"\n{len(cases)} cases, {arguments.times} times each: {failed} jobs failed")
    raise SystemExit(bool(failed))


def _print_times(outcomes: Sequence[dying.Outcome]) -> None:
    """Print the seconds from the death to the end, by the kind of death."""
    print("\n| death | jobs | mpirun ends: median | at most | last process: median | at most |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind in dying.KINDS:
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        if of_kind:
            times = [[outcome.seconds for outcome in of_kind], [outcome.gone for outcome in of_kind]]
            cells = " | ".join(f"{median(one):.2f} s | {max(one):.2f} s" for one in times)
            print(f"| {kind} | {len(of_kind)} | {cells} |")


def main() -> None:
    arguments = _arguments()
    if arguments.ulfm:
        _run_ulfm(arguments)
    cases = [case for case in dying.matrix() if all(re.search(one, str(case)) for one in arguments.only)]
    if arguments.hosts:
        size = sum(arguments.hosts)
        cases = [case for case in cases if case.size == size and not case.moment.endswith("shared")]
    if not cases:
        raise SystemExit("no case has such a name; see --list")
    if arguments.list:
        print(*cases, sep="\n")
        return
    variables = dict(one.split("=", 1) for one in arguments.env)
    outcomes = []
    print(f"{'case':30} {'outcome':7} {'status':>6} {'end':>6} {'gone':>6}  first line")
    for case in [case for case in cases for _ in range(arguments.times)]:
        outcome = dying.run(case, arguments.hosts, **variables)
        outcomes.append(outcome)
        verdict = "FAILED" if outcome.problems else "ok"
        print(
            f"{case!s:30} {verdict:7} {outcome.status:6} {outcome.seconds:5.2f}s {outcome.gone:5.2f}s"
            f"  {outcome.line or '-'}",
            flush=True,
        )
        for problem in outcome.problems:
            print(f"    {problem}")
        if outcome.problems:
            for name, text in (("stdout", outcome.out), ("stderr", outcome.err)):
                print("\n".join(f"    {name}| {line}" for line in text.splitlines()), flush=True)
    _print_times(outcomes)
    failed = [outcome for outcome in outcomes if outcome.problems]
    longest = max(outcome.gone for outcome in outcomes)
    print(f"\n{len(outcomes)} cases, {len(failed)} failed; the last process gone after at most {longest:.2f} s")
    for problem, count in Counter(problem for outcome in failed for problem in outcome.problems).most_common():
        print(f"{count:4} {problem}")
    left = [outcome for outcome in outcomes if outcome.left]
    if left:
        print(f"Open MPI left files behind in {len(left)} cases, such as {left[0].left[0]} ({left[0].case})")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
