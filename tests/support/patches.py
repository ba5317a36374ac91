"""Replacements in modules of the standard library that only one module under test sees."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def patch_within(monkeypatch: pytest.MonkeyPatch, module: ModuleType, library: ModuleType, **attributes: Any) -> None:
    """Let `module` see `library` with these attributes. Other threads of the process, such as those that earlier tests
    have left behind, keep the real one."""
    name = library.__name__
    assert getattr(module, name) is library
    monkeypatch.setattr(module, name, SimpleNamespace(**vars(library) | attributes))
