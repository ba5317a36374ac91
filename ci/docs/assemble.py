#!/usr/bin/env python3
"""Write the sources of the documentation site into a folder: docs/, and pages that are made from the code.

    python ci/docs/assemble.py build/docs/source

The pages made from the code are the API reference, the catalogue of algorithms and the sources of the examples.
docs/ itself stays as GitHub shows it: links that lead out of it are replaced by links to such pages.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

from mpicoll import schedules

ROOT = Path(__file__).resolve().parents[2]

NAVIGATION = {
    "Get started": ["tutorial", "installation", "coming-from", "operations", "torch", "examples/index"],
    "Train": ["data-parallel", "model-parallelism", "parameter-server", "synchronisation", "integrations"],
    "Run": ["command-line", "environment", "mpi", "slurm", "containers", "gpus", "scale"],
    "Understand": [
        "algorithms",
        "catalogue/index",
        "speed",
        "benchmarks",
        "faults",
        "tracing",
        "sharp-bits",
        "architecture",
    ],
    "Look up": [
        "api/index",
        "glossary",
        "project/changelog",
        "project/contributing",
        "project/security",
        "project/license",
    ],
}
"""The pages by section of the side bar."""

API: dict[str, dict[str, str]] = {
    "mpicoll": {
        "Collectives": "allreduce reduce bcast gather scatter allgather reduce_scatter alltoall scan exscan barrier",
        "Collectives in the background": "iallreduce ireduce ibcast igather iscatter iallgather ireduce_scatter"
        " ialltoall iscan iexscan ibarrier",
        "Plans": "allreduce_init reduce_init bcast_init gather_init scatter_init allgather_init reduce_scatter_init"
        " alltoall_init scan_init exscan_init barrier_init Plan",
        "Neighbours": "CartesianCommunicator GraphCommunicator dims_create neighbor_allgather neighbor_alltoall"
        " exchange_halo ineighbor_allgather ineighbor_alltoall iexchange_halo",
        "Messages": "send recv sendrecv isend irecv probe iprobe Status PROC_NULL",
        "Python objects": "bcast_object gather_object scatter_object allgather_object alltoall_object",
        "Communicators and jobs": "world Communicator run_local spawn resilient",
        "Requests": "Request waitall waitany",
        "Reductions": "Op premul_sum",
        "Memory": "empty Window",
        "Files": "File save load",
        "Algorithms": "algorithms explain Choice",
        "Debugging": "debug trace",
        "Errors": "MpicollError ArgumentError DTypeError ShapeError RankError AlgorithmError ScheduleError"
        " CommunicationError MismatchError TruncationError Timeout RankFailed CommunicatorError DeviceError"
        " FileError NumericsError SetupError SpawnError",
    },
    "mpicoll.schedules": {},
    "mpicoll.torch": {},
    "mpicoll.torch.autograd": {},
    "mpicoll.parallel": {},
    "mpicoll.parallel.checkpoint": {},
    "mpicoll.parallel.data_parallel.elastic": {"": "TorchState run"},
    "mpicoll.parallel.p2p": {},
    "mpicoll.parallel.parameter_server": {},
    "mpicoll.parallel.pipeline": {},
}
"""The modules, and their public names by section. A module without sections has them in alphabetical order."""


def assemble(target: Path) -> None:
    """Write all sources of the site to the folder `target`, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    shutil.copy(Path(__file__).with_name("conf.py"), target)
    for file in target.glob("*.md"):
        file.write_text(redirect_links(file.read_text(), ""))
    for page, text in [*make_api_pages(), *make_example_pages(), *make_project_pages()]:
        write(target / page, text)
    write_catalogue(target / "catalogue")
    # The README is the better front page: its table has all that docs/index.md lists.
    front = redirect_links(move_to_docs((ROOT / "README.md").read_text()), "")
    front += "".join(make_toctree(title, pages) for title, pages in NAVIGATION.items())
    write(target / "index.md", front)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def make_toctree(title: str, pages: list[str]) -> str:
    options = f":caption: {title}\n" if title else ""
    return "\n```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(pages) + "\n```\n"


def redirect_links(text: str, up: str) -> str:
    """Replace links of a page in docs/ to files outside of it by links to pages of the site; `up` leads to its root."""
    text = re.sub(r"\]\(\.\./README\.md", f"]({up}index.md", text)
    text = re.sub(r"\]\(\.\./([A-Z]+)(?:\.md)?", lambda one: f"]({up}project/{one[1].lower()}.md", text)
    text = re.sub(r"\]\(\.\./(examples/[\w/]+\.py)\)", rf"]({up}\1.md)", text)
    return re.sub(r"\]\(\.\./examples/\w+\)", f"]({up}examples/index.md)", text)


def move_to_docs(text: str) -> str:
    """Return a page of the repository's root with the links that it would have in docs/."""
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda one: "](" if one[1] else "](../", text)


# API


def list_sections(module: str) -> dict[str, list[str]]:
    """Return the public names of `module` by section of its page; modules have pages of their own."""
    if API[module]:
        return {title: names.split() for title, names in API[module].items()}
    owner = importlib.import_module(module)
    return {
        "": [name for name in sorted(owner.__all__, key=str.lower) if not has_own_page(getattr(owner, name), module)]
    }


def has_own_page(value: Any, module: str) -> bool:
    """Return True for modules, and for what a module within `module` is documented to define."""
    within = [name for name in API if name.startswith(f"{module}.")]
    return inspect.ismodule(value) or any(getattr(value, "__module__", "").startswith(f"{name}.") for name in within)


def make_api_pages() -> Iterator[tuple[str, str]]:
    lines = ["# API reference\n", "| module | about |", "|---|---|"]
    for module in API:
        summary = inspect.getdoc(importlib.import_module(module)).split("\n\n")[0].replace("\n", " ")
        lines.append(f"| [`{module}`]({module}.rst) | {summary} |")
        yield f"api/{module}.rst", "\n".join(describe_module(module))
    yield "api/index.md", "\n".join(lines) + "\n" + make_toctree("", list(API))


def describe_module(module: str) -> Iterator[str]:
    yield f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n   :no-members:\n"
    owner = importlib.import_module(module)
    for title, names in list_sections(module).items():
        if title:
            yield f"{title}\n{'-' * len(title)}\n"
        for name in names:
            value = getattr(owner, name)
            if inspect.isclass(value):
                yield f".. autoclass:: {module}.{name}\n   :members:\n"
            elif callable(value):
                yield f".. autofunction:: {module}.{name}\n"
            else:
                yield describe_data(module, name)


def describe_data(module: str, name: str) -> str:
    # Not autodata, which shows the documentation of the type of a value that another module defines.
    text, _, example = find_documentation(module, name).partition("\nExample:\n")
    body = f"{text}\n\n.. rubric:: Example\n\n{inspect.cleandoc(example)}\n"
    return f".. py:data:: {module}.{name}\n\n{indent(body, '   ')}"


def find_documentation(module: str, name: str) -> str:
    """Return the docstring of a public name: of data the string below its definition, or else that of its type."""
    value = getattr(importlib.import_module(module), name)
    if not callable(value):
        for found, home in sorted(sys.modules.items()):
            if found.startswith(module) and getattr(home, name, None) is value and (text := find_text(home, name)):
                return text
    return inspect.getdoc(inspect.unwrap(value)) or ""


def find_text(home: ModuleType, name: str) -> str:
    """Return the string below the assignment to `name` in the module `home`; "" if there is none."""
    for node, following in itertools.pairwise(ast.parse(inspect.getsource(home)).body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            match following:
                case ast.Expr(ast.Constant(str(text))):
                    return inspect.cleandoc(text)
    return ""


# Algorithms


def write_catalogue(folder: Path) -> None:
    """Write one page for each collective: its schedules with pictures, costs and sources."""
    folder.mkdir()
    write(folder / "index.md", CATALOGUE + make_toctree("", list(schedules.collectives())))
    for collective in schedules.collectives():
        parts = [f"# {collective}\n"]
        for name, algorithm in schedules.algorithms_of(collective).items():
            segments = 3 if algorithm.segmented else 1
            text = schedules.draw(algorithm, 4, segments=segments, file=folder / f"{collective}-{name}.svg")
            parts += [f"\n## {collective}/{name}\n", inspect.cleandoc(algorithm.generate.__doc__ or ""), ""]
            parts += ["| | |", "|---|---|", f"| rounds | `{algorithm.rounds}` |"]
            parts += [f"| bytes that the busiest rank sends | n · `{algorithm.sent}` |"]
            parts += [f"\n![{collective}/{name}, 4 ranks]({collective}-{name}.svg)\n", f"```text\n{text.rstrip()}\n```"]
        write(folder / f"{collective}.md", "\n".join(parts) + "\n")


CATALOGUE = """\
# Catalogue of algorithms

All schedules, drawn for 4 ranks. [Algorithms](../algorithms.md) describes how one is selected, and how to write your
own. `mpicoll algorithms verify` proves them correct for numbers of ranks that you choose. The closed forms below equal
the counts of what each rank does.

P is the number of ranks, S that of segments, n the bytes of the vector, or of all blocks of one buffer. `lg` is log2 P
rounded up, `p2` the largest power of two up to P, and `r` is P - p2.
"""


# Examples and project


def make_example_pages() -> Iterator[tuple[str, str]]:
    """The source of each example, and a page that lists them."""
    folder = ROOT / "examples"
    lines = ["# Examples\n", "Each of them is run by a test.\n", "| example | about |", "|---|---|"]
    pages = []
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        documentation = ast.get_docstring(ast.parse(file.read_text()))
        assert documentation is not None, file
        pages.append(name)
        lines.append(f"| [`{name}`]({name}.md) | {' '.join(documentation.split(chr(10) * 2)[0].split())} |")
        yield f"examples/{name}.md", f"# {name}\n\n~~~~python\n{file.read_text()}~~~~\n"
    yield "examples/index.md", "\n".join(lines) + "\n" + make_toctree("", pages)


def make_project_pages() -> Iterator[tuple[str, str]]:
    """The pages of the repository's root."""
    for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"):
        text = redirect_links(move_to_docs((ROOT / f"{name}.md").read_text()), "")
        yield f"project/{name.lower()}.md", re.sub(r"\]\((?!https?:|#)", "](../", text)
    yield "project/license.md", f"# Licence\n\n```text\n{(ROOT / 'LICENSE').read_text()}```\n"


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
