"""The process that mpirun starts as a rank that is forked: see `warm`. Its interpreter has no site-packages.

It has the server run a program with its arguments, environment, folder and files, passes signals on to the forked
process, and ends as that one does. Without a server it becomes the program itself.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
request = [sys.argv[2:], dict(os.environ), str(Path.cwd()), sorted(os.sched_getaffinity(0))]
try:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    pid = int(connection.recv(32) or 0)
except OSError:
    pid = 0
if not pid:
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


def pass_on(number, frame):
    """Send a signal to the forked process. If that has ended, its status is on the way."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


for number in PASSED_ON:
    signal.signal(number, pass_on)
try:
    status = connection.recv(32)
except OSError:
    status = b""
if not status:  # the server was killed
    pass_on(signal.SIGKILL, None)
    sys.exit("the process that this rank was forked from is gone")
code = os.waitstatus_to_exitcode(int(status))
if code < 0:
    if -code in PASSED_ON:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
