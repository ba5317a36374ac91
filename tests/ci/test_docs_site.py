"""The sources of the documentation site: nothing is left out, and no link leads out of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import mpicoll

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("assemble", ROOT / "ci" / "docs" / "assemble.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_a_place(site: ModuleType) -> None:
    names = [name for section in site.list_sections("mpicoll").values() for name in section]
    assert sorted([*names, "schedules"]) == sorted(mpicoll.__all__)


def test_every_page_is_in_the_navigation(site: ModuleType) -> None:
    navigation = [page for pages in site.NAVIGATION.values() for page in pages]
    assert len(set(navigation)) == len(navigation)
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages == {page for page in navigation if "/" not in page}


def test_links_stay_in_the_site(site: ModuleType) -> None:
    made = dict([*site.make_example_pages(), *site.make_project_pages()])
    known = {file.name for file in (ROOT / "docs").glob("*.md")} | made.keys()
    texts = {file.name: site.redirect_links(file.read_text(), "") for file in (ROOT / "docs").glob("*.md")}
    texts["index.md"] = site.redirect_links(site.move_to_docs((ROOT / "README.md").read_text()), "")
    pages = texts | {name: text for name, text in made.items() if name.startswith("project/")}
    broken = [
        (page, target)
        for page, text in pages.items()
        for target in re.findall(
            r"\]\(((?!https?:|#)[^)#\s]+\.md)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        )
        if str((Path("/") / page).parent.joinpath(target).resolve())[1:] not in known
    ]
    assert not broken
    assert not [page for page, text in texts.items() if re.search(r"\]\(\.\./", text)]
