#!/usr/bin/env python3
"""Follow docs/tutorial.md from nothing, as a newcomer does: python ci/tutorial.py

Clones the commit of this checkout into an empty folder, and runs there all commands of the page in order, in one shell:
those of its shell blocks, and those in front of outputs, which the Python block before them has to print. A Python
block that is followed by neither continues the program before it, which runs again. Each line of the output begins with
the seconds since the clone; the last lines say when the first program had run, and when all had. Fails if a command
fails, or prints something else. Of this shell, the commands inherit pip's settings only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

START = """\
set -euo pipefail
begin=$(date +%s%N)
seconds() { awk -v begin="$begin" -v now="$(date +%s%N)" 'BEGIN { printf "%.1f", (now - begin) / 1e9 }'; }
say() { printf '%7s  %s\\n' "$(seconds)" "$*"; }
first=
"""

SESSION = """\
cp {program} {name}
say {command}
{command_line} >output.txt 2>errors.txt || {{ cat output.txt errors.txt; exit 1; }}
diff --ignore-trailing-space {expected} output.txt || {{ cat errors.txt; exit 1; }}
first=${{first:-$(seconds)}}
"""

END = """\
echo "the first program had run after $first s, all of them after $(seconds) s"
"""


def write_script(page: str, folder: Path) -> str:
    """Return a script of bash that does what `page` says. Programs and outputs are written to `folder`."""
    script = START
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    code, session = "", ""
    for number, (language, text) in enumerate(blocks):
        following = blocks[number + 1][1] if number + 1 < len(blocks) else ""
        if language == "sh":
            lines = [line for line in text.splitlines() if line.strip()]
            script += "".join(f"say {shlex.quote(line)}\n{line}\n" for line in lines)
        elif language == "python":
            if following.startswith("$ "):
                code, session = text, following
            else:
                code += text
            script += run_session(code, session, folder, number)
    return script + END


def run_session(code: str, session: str, folder: Path, number: int) -> str:
    """Return the commands that run a program and compare its output with that of `session`."""
    command, _, output = session.removeprefix("$ ").partition("\n")
    program, expected = folder / f"{number}.py", folder / f"{number}.txt"
    program.write_text(code)
    expected.write_text(output)
    name = next(word for word in command.split() if word.endswith(".py"))
    return SESSION.format(
        program=shlex.quote(str(program)),
        expected=shlex.quote(str(expected)),
        name=name,
        command=shlex.quote(command),
        command_line=command,
    )


def main() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    kept = ("HOME", "LANG", "PATH", "SSL_CERT_FILE", "TMPDIR")
    variables = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
    if sys.prefix != sys.base_prefix:
        # The environment of this script is not that of the page.
        places = [place for place in variables["PATH"].split(os.pathsep) if place != f"{sys.prefix}/bin"]
        variables["PATH"] = os.pathsep.join(places)
    with tempfile.TemporaryDirectory(prefix="mpicoll-tutorial-") as name:
        folder = Path(name)
        script = folder / "script.sh"
        script.write_text(write_script(page, folder))
        checkout = folder / "mpicoll"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        raise SystemExit(subprocess.run(["bash", str(script)], cwd=checkout, env=variables, check=False).returncode)


if __name__ == "__main__":
    main()
