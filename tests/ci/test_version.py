"""The version that setup.py finds: in a checkout by the tags, elsewhere as it was found before."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT

pytestmark = pytest.mark.slow


def run(folder: Path, *command: str) -> str:
    author = {
        f"GIT_{role}_{what}": "someone@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | author | settings, capture_output=True, text=True, check=True, timeout=60
    )
    return ended.stdout.strip()


def find_version(folder: Path) -> str:
    return run(folder, sys.executable, "setup.py", "--quiet", "--version").splitlines()[-1]


def make_tree(folder: Path) -> Path:
    (folder / "mpicoll").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", folder)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = make_tree(tmp_path / "checkout")
    (folder / ".gitignore").write_text("/mpicoll/_version.py\n")
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "--quiet", "--message", "First")
    return folder


def test_version_of_a_tag(checkout: Path) -> None:
    assert re.fullmatch(r"0\.1\.0\.dev1\+g[0-9a-f]+", find_version(checkout)), "there is no tag"
    run(checkout, "git", "tag", "v1.2.9")
    run(checkout, "git", "tag", "other")
    assert find_version(checkout) == "1.2.9"
    assert (checkout / "mpicoll" / "_version.py").read_text().endswith('__version__ = "1.2.9"\n')
    with (checkout / "setup.py").open("a") as file:
        file.write("\n")
    assert re.fullmatch(r"1\.2\.10\.dev0\+g[0-9a-f]+", find_version(checkout)), "a file was changed"
    run(checkout, "git", "commit", "--quiet", "--all", "--message", "Second")
    assert re.fullmatch(r"1\.2\.10\.dev1\+g[0-9a-f]+", find_version(checkout))
    run(checkout, "git", "tag", "v2.0.0rc1")
    assert find_version(checkout) == "2.0.0rc1"


def test_version_without_git(checkout: Path) -> None:
    """A source distribution, also one that was unpacked in another checkout."""
    run(checkout, "git", "tag", "v1.2.9")
    inner = make_tree(checkout / "inner")
    assert find_version(inner) == "0+unknown"
    assert find_version(checkout) == "1.2.9"
    shutil.copy(checkout / "mpicoll" / "_version.py", inner / "mpicoll")
    run(checkout, "git", "tag", "v3.0.0")
    assert find_version(inner) == "1.2.9"
