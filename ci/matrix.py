"""Print a table of test runs in Markdown, for ci/matrix.sh: ci/matrix.py NAME:VERSION:RANKS:FOLDERS:JUNIT_XML...

A row without a junit XML file is a run that was cut short: its tests are unknown. A row with "passed" or "failed" in
its place is one check. A row NAME:REASON is a library that could not be tested.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

EMPTY = ("", "", "", "", "", "")


def describe(row: str) -> tuple[str, ...]:
    """Return the cells of a row: name, version, ranks, folders, passed, failed, skipped, reasons."""
    name, _, rest = row.partition(":")
    if rest.count(":") < 3:
        return (name, rest, *EMPTY)
    version, ranks, folders, path = rest.split(":", 3)
    head = (name, version, ranks, folders)
    if path in ("passed", "failed"):
        return (*head, str(int(path == "passed")), str(int(path == "failed")), "0", "")
    if not Path(path).exists():
        return (*head, "", "cut short", "", "")
    passed, failed, skips = 0, [], Counter[str]()
    for case in ET.parse(path).iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            skips[skip.get("message", "no reason")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name", ""))
        else:
            passed += 1
    reasons = "; ".join(f"{count}: {reason}" for reason, count in skips.most_common())
    reasons = "; ".join(filter(None, [reasons, f"failed: {', '.join(failed)}" if failed else ""]))
    return (*head, str(passed), str(len(failed)), str(skips.total()), reasons.replace("|", "/").replace("\n", " "))


def main(rows: list[str]) -> None:
    cells = ["MPI", "version", "ranks", "tests of", "passed", "failed", "skipped", "reasons"]
    for row in (cells, ["---"] * len(cells), *map(describe, rows)):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
