#!/usr/bin/env python3
"""Write the hashes of what CI installs: ci/requirements.txt, and -cuda.txt, -compiler.txt, -tidy.txt and -mpi.txt
beside it.

    pip install uv
    python ci/lock.py          # after a change of ci/constraints.txt or of the dependencies in pyproject.toml
    python ci/lock.py --cpu    # first fetch the hashes of the CPU-only builds of torch, to ci/torch-cpu.sha256

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
from collections.abc import Iterator
from pathlib import Path

CI = Path(__file__).resolve().parent

CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"

EXTRAS = ("openmpi", "plot", "torch", "test", "dev")

TOOLS = ("setuptools", "ziglang", "clang-tidy")
"""What the editable installation needs, which pip does without an environment of its own for the build, and what
ci/analyse.sh does."""

MPI_LIBRARIES = ("mpich", "impi-rt")
"""What ci/matrix.sh installs, without dependencies: PyPI has no libfabric, which impi-rt names and contains."""

FILES = (
    ("-cuda", "the CUDA libraries of torch from PyPI", r"(nvidia|cuda|triton)\b"),
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
    cpu = CI / "torch-cpu.sha256"
    if parser.parse_args().cpu:
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


def resolve() -> str:
    """Return the requirements with the hashes of all files on PyPI."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--python-version", "3.10"]
    command += ["--no-header", "--no-annotate", "--no-config"]
    command += ["--constraint", str(CI / "constraints.txt")]
    extras = [option for extra in EXTRAS for option in ("--extra", extra)]
    return "".join(
        subprocess.run(
            [*command, *more, "-"], input="\n".join(packages), stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for packages, more in ((TOOLS, [*extras, str(CI.parent / "pyproject.toml")]), (MPI_LIBRARIES, ["--no-deps"]))
    )


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
