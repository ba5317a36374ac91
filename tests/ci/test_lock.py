"""The hashes of what CI installs belong to the pinned versions."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CI = Path(__file__).resolve().parents[2] / "ci"

SYSTEM = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", CI / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(python: str) -> dict[str, Any]:
    return SYSTEM | {"python_version": python, "python_full_version": f"{python}.5", "extra": ""}


def pins(lines: list[str], python: str) -> dict[str, str]:
    """The version of each package that such a Python gets."""
    found: dict[str, str] = {}
    for line in lines:
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate(environment(python)):
            name = canonicalize_name(one.name)
            assert name not in found, f"{name} has several versions on Python {python}"
            found[name] = str(one.specifier)
    return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_hashes_are_of_the_pinned_versions(lock: ModuleType, python: str) -> None:
    blocks = list(lock.split((CI / "requirements.txt").read_text()))
    if python != "3.10":  # which builds no documentation
        blocks += lock.split((CI / "requirements-docs.txt").read_text())
    locked = pins([one.split(" \\\n")[0] for one in blocks if not one.startswith("#")], python)
    lines = (CI / "constraints.txt").read_text().splitlines()
    pinned = pins([line for line in lines if line and not line.startswith("#")], python)
    assert locked == {name: version for name, version in pinned.items() if name in locked}
    # The compiler, the analysis and other MPI libraries have files of their own; older versions of scikit-learn do
    # without narwhals.
    assert pinned.keys() - locked.keys() <= {"clang-tidy", "cupy-cuda13x", "impi-rt", "mpich", "narwhals", "ziglang"}


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("requirements", 50),
        ("requirements-cuda", 11),
        ("requirements-cupy", 1),
        ("requirements-compiler", 1),
        ("requirements-tidy", 1),
        ("requirements-mpi", 2),
    ],
)
def test_every_requirement_has_hashes(lock: ModuleType, file: str, least: int) -> None:
    text = (CI / f"{file}.txt").read_text()
    blocks = [one for one in lock.split(text) if not one.startswith("#")]
    assert len(blocks) >= least
    for one in blocks:
        assert re.fullmatch(r"[a-z0-9-]+==\S+(?: ; .*?)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", one), one


def test_builds_for_cpus_have_hashes(lock: ModuleType) -> None:
    blocks = lock.split((CI / "requirements.txt").read_text())
    torch = next(one for one in blocks if one.startswith("torch=="))
    lines = (CI / "torch-cpu.sha256").read_text().splitlines()
    assert any("-cp311-cp311-manylinux_2_28_x86_64.whl" in line for line in lines)
    for line in lines:
        digest, name = line.split("  ")
        assert name.startswith(f"torch-{lock.pinned('torch')}+cpu-")
        assert f"--hash=sha256:{digest}" in torch


def test_builds_that_an_index_lists(lock: ModuleType) -> None:
    """In the form of PyTorch's index, with builds of other versions and for CUDA."""
    digests = ["a" * 64, "b" * 64, "c" * 64, "d" * 64]
    names = [
        "torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torch-2.13.0%2Bcpu-cp311-cp311-win_amd64.whl",
        "torch-2.12.0%2Bcpu-cp311-cp311-win_amd64.whl",
        "torch-2.13.0%2Bcu130-cp311-cp311-win_amd64.whl",
    ]
    page = "".join(
        f'<a href="/whl/cpu/{name}#sha256={digest}" data-dist-info-metadata="sha256={"e" * 64}">{name}</a><br/>\n'
        for name, digest in zip(names, digests, strict=True)
    )
    assert lock.list_builds(page, "2.13.0") == (
        f"{'b' * 64}  torch-2.13.0+cpu-cp311-cp311-win_amd64.whl\n"
        f"{'a' * 64}  torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl\n"
    )
