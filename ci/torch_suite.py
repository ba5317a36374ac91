"""PyTorch's own tests of a c10d backend, run on mpicoll: python ci/torch_suite.py [--np 3] [--only REGEX]

The tests are those of ``torch/testing/_internal/distributed/distributed_test.py``, which is in every wheel of torch.
All of them run in as few MPI jobs as possible, each in a separate process group. A test that fails or hangs on a rank
ends its job (a hang after printing the stacks of all ranks); the rest go on in a new one. The status of a test is the
worst of its ranks'. Where the tests ask for a backend by name, mpicoll answers to mpi and gloo.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

NAME = "torch_distributed_test"

STUCK = {
    "test_barrier_timeout_global": "a rank leaves a barrier that the others never enter, so the job can't end well",
    "test_barrier_timeout_group": "the same",
    "test_barrier_timeout_full_group": "the same",
}
"""Tests that run in a job of their own, whose exit status does not count, and why."""


def load(size: int) -> tuple[Any, Any]:
    """The module of the tests and the class that holds them, made for `size` ranks of mpicoll."""
    os.environ.update(BACKEND="mpicoll", WORLD_SIZE=str(size), INIT_METHOD="file:///dev/null", MASTER_ADDR="127.0.0.1")
    import torch.testing._internal.common_distributed as common
    from torch.testing._internal.common_utils import TestCase

    for feature in ("ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add("mpicoll")
    # Written for 8 ranks, unless the backend is MPI; three are enough for what they do.
    common.skip_if_small_worldsize = lambda test: test
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for old, new in (
        ('BACKEND = os.environ["BACKEND"]\n', "BACKEND = _Answers('mpicoll')\n"),
        ("if BACKEND not in backends:", "if not any(BACKEND == one for one in backends):"),
        # DDP's logger takes the name from the type of the backend, which is "custom" for all that torch was not built
        # with; a backend in Python can't change that.
        ('.get("backend_name"), dist.get_backend(group_id)\n', '.get("backend_name"), group_id.name()\n'),
    ):
        if old not in source:
            raise SystemExit(f"torch_suite: this torch's tests have no line {old!r}; adapt ci/torch_suite.py to them")
        source = source.replace(old, new)
    module = types.ModuleType(NAME)
    module.__file__ = spec.origin
    module.__dict__["_Answers"] = Answers
    sys.modules[NAME] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)

    class Suite(TestCase, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
        world_size = str(size)
        file_name = ""

        @property
        def init_method(self) -> str:
            return f"file://{self.file_name}"

        def _handle_test_skip(self, message: str) -> None:
            self.skipTest(message)

    return module, Suite


class Answers(str):
    """A name of a backend that is equal to each name that mpicoll can stand in for."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in ("mpicoll", "mpi", "gloo")

    def __ne__(self, other: object) -> bool:
        return not self == other


def rank_main(folder: Path, size: int, seconds: int) -> None:
    """One rank: run the tests that ``folder/names`` lists, and write down how each ends."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.common_distributed as common

    torch.set_num_threads(1)
    module, suite = load(size)
    codes = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
    with (folder / f"rank{suite.rank}").open("a", buffering=1) as log:

        def tell(**event: Any) -> None:
            log.write(json.dumps(event) + "\n")

        for number, name in enumerate((folder / "names").read_text().split()):
            place = folder / f"test{number}"
            for part in ("barrier", "test_dir", "init_dir"):
                (place / part).mkdir(parents=True, exist_ok=True)
            module.INIT_METHOD = os.environ["INIT_METHOD"] = f"file://{place}/init_dir/shared_init_file"
            os.environ["TEMP_DIR"] = str(place)
            module.Barrier.barrier_id = 0
            tell(test=name)
            faulthandler.dump_traceback_later(seconds, exit=True)
            status, message = one_test(module, suite, name, place, size, codes)
            faulthandler.cancel_dump_traceback_later()
            tell(test=name, status=status, message=message)
            if status == "failed":
                os._exit(3)
        if dist.is_initialized():
            dist.destroy_process_group()


def one_test(module: Any, suite: Any, name: str, place: Path, size: int, codes: dict[int, str]) -> tuple[str, str]:
    """How the test ends on this rank, and why."""
    import torch.distributed as dist

    test = getattr(suite, name)
    if getattr(test, "__unittest_skip__", False):
        return "skipped", test.__unittest_skip_why__
    timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout))
    try:
        dist.init_process_group(
            "mpicoll", init_method=f"file://{place}/group", rank=suite.rank, world_size=size, timeout=timeout
        )
        case = suite(name)
        case.file_name = str(place / "file")
        case._barrier(timeout=30)
        try:
            case.setUp()
            status, message = "passed", ""
            try:
                getattr(case, name)()
            finally:
                case.tearDown()
                case.doCleanups()
        except unittest.SkipTest as skip:
            status, message = "skipped", str(skip)
        except SystemExit as leaving:
            if leaving.code not in codes:
                raise
            status, message = "skipped", codes[leaving.code]
        module.Barrier.sync(size, timeout=30)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  whatever it is, it is what the test is about
        return "failed", "".join(traceback.format_exception(error))[-4000:]
    return status, message


def run_job(names: list[str], size: int, seconds: int, outcomes: dict[str, tuple[str, str]]) -> int:
    """Run `names` in one MPI job and note how they end; how many of them are done with."""
    with tempfile.TemporaryDirectory(prefix="torch_suite_") as place:
        folder = Path(place)
        (folder / "names").write_text("\n".join(names))
        command = ["mpirun", "-np", str(size), sys.executable, __file__, "--np", str(size)]
        command += ["--seconds", str(seconds), "--folder", place]
        with (folder / "output").open("wb") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        events = [list(read_events(folder / f"rank{rank}")) for rank in range(size)]
        output_text = (folder / "output").read_text(errors="replace")[-6000:]
    for number, name in enumerate(names):
        ends = [event for one in events for event in one if event["test"] == name and "status" in event]
        failed = [event for event in ends if event["status"] == "failed"]
        if failed:
            outcomes[name] = "failed", failed[0]["message"]
            return number + 1
        if len(ends) < size:
            outcomes[name] = "failed", f"no end on {size - len(ends)} ranks; mpirun's status {status}\n{output_text}"
            return number + 1
        passed = [event for event in ends if event["status"] == "passed"]
        # Some tests skip the ranks that are in no group of theirs.
        outcomes[name] = ("passed", "") if passed else ("skipped", ends[0]["message"])
    if status and not set(names) <= set(STUCK):
        outcomes[f"the end of the job after {names[-1]}"] = "failed", f"mpirun's status {status}\n{output_text}"
    return len(names)


def read_events(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return  # cut short by the end of its rank


def write_report(path: Path, outcomes: dict[str, tuple[str, str]]) -> None:
    """JUnit's XML, as pytest writes it."""
    kinds = [status for status, _ in outcomes.values()]
    counts = {"tests": len(kinds), "failures": kinds.count("failed"), "skipped": kinds.count("skipped"), "errors": 0}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {key: str(count) for key, count in counts.items()})
    for name, (status, message) in outcomes.items():
        case = ET.SubElement(suite, "testcase", name=name, classname=NAME)
        if status != "passed":
            tag = "failure" if status == "failed" else "skipped"
            ET.SubElement(case, tag, message=re.sub(r"[^\x20-\x7e\n]", "?", message)[:4000])
    ET.ElementTree(root).write(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=3, help="ranks (default: 3, the least that the tests are made for)")
    parser.add_argument("--only", default="", help="run the tests whose names this regular expression is found in")
    parser.add_argument("--seconds", type=int, default=60, help="bound for each test")
    parser.add_argument("--junit-xml", type=Path, help="write a report there")
    parser.add_argument("--list-skipped", action="store_true", help="say which tests are skipped, and why")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        rank_main(options.folder, options.np, options.seconds)
        return 0
    begin = time.monotonic()
    _, suite = load(options.np)
    names = [name for name in sorted(dir(suite)) if name.startswith("test_") and re.search(options.only, name)]
    outcomes: dict[str, tuple[str, str]] = {}
    for name in names:
        test = getattr(suite, name)
        if getattr(test, "__unittest_skip__", False):
            outcomes[name] = "skipped", test.__unittest_skip_why__
    left = [name for name in names if name not in outcomes and name not in STUCK]
    while left:
        left = left[run_job(left, options.np, options.seconds, outcomes) :]
    for name in STUCK:
        if name in names and name not in outcomes:
            run_job([name], options.np, options.seconds, outcomes)
    for name, (status, message) in outcomes.items():
        if status == "failed":
            print(f"\nFAILED {name}\n{message}")
        elif status == "skipped" and options.list_skipped:
            print(f"skipped {name}: {message}")
    if options.junit_xml:
        write_report(options.junit_xml, outcomes)
    kinds = [status for status, _ in outcomes.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"PyTorch's own tests at {options.np} ranks: {counts} in {time.monotonic() - begin:.0f} s")
    return 1 if "failed" in kinds or "passed" not in kinds else 0


if __name__ == "__main__":
    sys.exit(main())
