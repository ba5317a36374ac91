"""ci/gpu.sh, as far as a machine without a GPU can show."""

from __future__ import annotations

import subprocess
import sys
import venv
from ctypes.util import find_library
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


def ask(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_inside_of_another_finds_its_packages(tmp_path: Path) -> None:
    """By import, and where site says that packages are: there cupy looks for NVRTC and CUDA's headers."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    venv.create(outer, with_pip=False, symlinks=True)
    packages = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = Path(ask(outer / "bin/python", packages))
    (theirs / "outer_only.py").write_text("")
    include = theirs / "nvidia" / "cu13" / "include"
    include.mkdir(parents=True)
    (include / "cuda_runtime.h").write_text("")
    subprocess.run([outer / "bin/python", "-m", "venv", "--without-pip", inner], check=True)
    script = [outer / "bin/python", CI / "gpu.py", "outer"]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    (Path(ask(inner / "bin/python", packages)) / "zz_outer.pth").write_text(lines)
    found = "import outer_only, site; print(*site.getsitepackages(), sep='\\n')"
    assert str(theirs) in ask(inner / "bin/python", found).splitlines()


def test_parts_are_checked_before_anything_runs() -> None:
    done = subprocess.run(["bash", CI / "gpu.sh", "tests", "everything"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: " in done.stderr


def test_without_a_gpu_nothing_is_said_to_be_verified() -> None:
    if find_library("cuda"):
        pytest.skip("there may be a GPU, and then the script does its work")
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", CI / "gpu.sh", "install", "doctor"], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (
        1,
        "mpicoll: no NVIDIA GPU here (the driver knows of none), so nothing was verified",
    )
