"""Look into a junit XML file of pytest: python ci/count.py REPORT

Prints "passed failed skipped", zeros if there is no file: a run that was cut short wrote none. For ci/stages.sh, also

failed REPORT           print the ids of the tests that failed, for pytest's command line; nothing if one of them can't
                        be run once more: it has ended a process of pytest-xdist, or isn't in a file below here
unsteady FIRST SECOND   print the ids of tests that failed in the first run and passed in the second one
text REPORT ID          print what the test has to say of its failure
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

FAILED = ("failure", "error")
NOT_PASSED = (*FAILED, "skipped")


def read(path: str) -> list[ET.Element]:
    return list(ET.parse(path).iter("testsuite")) if Path(path).exists() else []


def count(path: str) -> tuple[int, int, int]:
    """How many tests have passed, failed and were skipped."""
    suites = read(path)
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return max(0, tests - failures - errors - skipped), failures + errors, skipped


def group_cases(path: str) -> dict[str, list[ET.Element]]:
    """The cases by the id of their test: there are two of a test that fails, and again in its teardown."""
    cases: dict[str, list[ET.Element]] = {}
    for suite in read(path):
        for case in suite.iter("testcase"):
            cases.setdefault(make_id(case.get("classname", ""), case.get("name", "")), []).append(case)
    return cases


def make_id(module: str, name: str) -> str:
    """The id of the test `name` in the class or module whose path has dots for slashes; "" if there is no such file."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end]).with_suffix(".py")
        if path.is_file():
            return "::".join([path.as_posix(), *parts[end:], name])
    return ""


def find_failures(cases: Iterable[ET.Element]) -> list[ET.Element]:
    return [one for case in cases for tag in FAILED for one in case.findall(tag)]


def say(failure: ET.Element) -> str:
    return failure.text or failure.get("message", "")


def list_failed(path: str) -> list[str]:
    """The ids of all that failed; nothing if one of them can't be run once more."""
    failures = {name: found for name, cases in group_cases(path).items() if (found := find_failures(cases))}
    crash = re.compile(r"worker '\w+' crashed while running ")
    if "" in failures or any(crash.match(say(one)) for found in failures.values() for one in found):
        return []
    return list(failures)


def list_unsteady(first: str, second: str) -> list[str]:
    """The ids of tests that failed first, and then passed."""
    again = group_cases(second)
    return [
        name
        for name in list_failed(first)
        if again.get(name) and all(case.find(tag) is None for case in again[name] for tag in NOT_PASSED)
    ]


def describe(path: str, name: str) -> str:
    """What a test has to say of its failure."""
    return "\n".join(map(say, find_failures(group_cases(path)[name])))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["failed", report]:
            print_lines(list_failed(report))
        case ["unsteady", first, second]:
            print_lines(list_unsteady(first, second))
        case ["text", report, name]:
            print(describe(report, name))
        case [report]:
            print(*count(report))
        case _:
            raise SystemExit(__doc__)
