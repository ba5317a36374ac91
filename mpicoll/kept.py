"""What programs keep for later ones: where, and how it is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def place(name: str) -> Path | None:
    """The file of that name among those that mpicoll keeps for a user; None where there is no home directory."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "mpicoll" / name


def replace(path: Path, text: str) -> None:
    """Let the file hold `text`. It is replaced as a whole: whoever reads it meanwhile sees the one or the other. Raises
    OSError, and leaves nothing behind, if it can't be written."""
    draft = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            draft = Path(file.name)
            file.write(text)
        draft.replace(path)
    except OSError:
        if draft is not None:
            draft.unlink(missing_ok=True)
        raise
