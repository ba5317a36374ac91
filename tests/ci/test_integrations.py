"""The integrations: the page, the workflow and the files of the environments name what the script tests."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ci" / "integrations"
PAGE = (ROOT / "docs" / "integrations.md").read_text()


@pytest.fixture(scope="module")
def versions() -> dict[str, list[str]]:
    """The pinned packages of each integration, the library first."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "ci" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    lock: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    found: dict[str, list[str]] = lock.list_integrations()
    return found


def test_the_table_has_the_versions_of_the_script(versions: dict[str, list[str]]) -> None:
    rows = re.findall(r"^\| \[.*?\]\(#.*?\) \| (\S+ \S+) \|", PAGE, re.MULTILINE)
    assert rows == [packages[0].replace("==", " ") for packages in versions.values()]


def test_every_integration_has_its_files(versions: dict[str, list[str]]) -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} == {*versions, "versions"}
    assert {file.stem for file in FOLDER.glob("test_*.py")} == {f"test_{name}" for name in versions}


def test_hashes_are_of_the_pinned_versions(versions: dict[str, list[str]]) -> None:
    installed = (ROOT / "ci" / "requirements.txt").read_text()
    for name, packages in versions.items():
        text = (FOLDER / f"{name}.txt").read_text()
        for package in packages:
            assert re.search(rf"^{re.escape(package)}\s", text + installed, re.MULTILINE), package
        for one in re.findall(r"^[a-z].*\n(?:[ ].*\n)*", text, re.MULTILINE):
            assert re.fullmatch(r"[a-z0-9._-]+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", one), one


def test_the_workflow_runs_all(versions: dict[str, list[str]]) -> None:
    text = (ROOT / ".github" / "workflows" / "integrations.yml").read_text()
    found = re.search(r"library: \[(.*)\]", text)
    assert found is not None
    assert found[1].split(", ") == list(versions)


def test_lines_of_the_page_are_in_the_programs() -> None:
    """So the weekly tests have run them."""
    programs = "\n".join(file.read_text() for file in FOLDER.glob("*.py"))
    known = {line.strip() for line in programs.splitlines()}
    shown = [
        line
        for block in re.findall(r"^```py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert len(shown) >= 8
    assert not [line for line in shown if line.strip().replace("torch.distributed.", "dist.") not in known]
