#!/usr/bin/env python3
"""Start commands in the other containers of a job, in place of ssh, through a folder that they share.

    agent.py serve             in each other container: run the commands that arrive for this host, until it is stopped
    agent.py HOST COMMAND...   what mpirun calls for each host; ends with the command's exit status

The folder is /run/mpicoll, or AGENT_FOLDER. It has a folder for each host, with one file for each command. Who may
write to it may run commands in the containers, so it belongs to the user of the job, and has the mode 700.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TextIO

FOLDER = Path(os.environ.get("AGENT_FOLDER", "/run/mpicoll"))

PATIENCE = 60.0
"""Seconds in which a container of the job starts."""

PAUSE = 0.05


def serve(host: str) -> None:
    folder = FOLDER / host
    # What an earlier job has left. No command arrives before the lock is held.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    running: dict[Path, subprocess.Popen[bytes]] = {}
    while True:
        for file in folder.glob("*.command"):
            # As with ssh, the shell splits the line.
            running[file] = subprocess.Popen(
                ["/bin/sh", "-c", file.read_text()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            file.unlink()
        for file in [file for file, process in running.items() if process.poll() is not None]:
            status = running.pop(file).returncode
            write(file.with_suffix(".status"), str(status if status >= 0 else 128 - status))
        time.sleep(PAUSE)


def request(host: str, command: str) -> int:
    folder = FOLDER / host
    limit = time.monotonic() + PATIENCE
    while not is_served(folder):
        if time.monotonic() > limit:
            print(f"agent: no `agent.py serve` runs on {host} (it would lock {folder}/lock)", file=sys.stderr)
            return 255
        time.sleep(PAUSE)
    name = uuid.uuid4().hex
    write(folder / f"{name}.command", command)
    status = folder / f"{name}.status"
    while not status.exists():
        if not is_served(folder):
            print(f"agent: `agent.py serve` on {host} has ended before the command", file=sys.stderr)
            return 255
        time.sleep(PAUSE)
    code = int(status.read_text())
    status.unlink()
    return code


def is_served(folder: Path) -> bool:
    """Return True if a process holds the lock. The file may be that of an earlier job."""
    try:
        lock: TextIO = (folder / "lock").open()
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def write(file: Path, text: str) -> None:
    """Write a file that is complete as soon as it is there."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def main(words: list[str]) -> int:
    if words == ["serve"]:
        # The first process of a container has no default handlers of signals.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        serve(socket.gethostname())
    if len(words) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    return request(words[0], " ".join(words[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
