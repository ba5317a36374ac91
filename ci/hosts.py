"""Run a program on several hosts that this machine plays: network namespaces behind a bridge. Needs root and iproute2.

    python ci/hosts.py --rate 1gbit 2 4 python program.py     2 hosts, 4 ranks on each, links of 1 Gbit/s
    python ci/hosts.py 2 2,1 python program.py                2 ranks on the first host, 1 on the second
    python ci/hosts.py --cut 1 cut --heal back 2 2 python program.py
                                    host 1 loses its link when the file `cut` appears, and has it again with `back`
    python ci/hosts.py --setup 'ip addr add 10.79.0.$HOST/24 dev eth0' 2 1 python program.py
                                    each host has another address; the hosts are numbered from 0
    python ci/hosts.py --alone 2 0 bash script.sh
                                    no mpirun: the script runs once, on host 0, and `$ON_HOST h1 COMMAND` on host 1

Each host has its own name, address, /dev/shm and System V memory; mpirun (of Open MPI, MPICH or Intel MPI, the one
beside this Python or in PATH) reaches them without ssh. All of it lives in namespaces of this run alone, and vanishes
with it, however it ends; several runs may go on at once. TMPDIR is a folder of this run too. The exit status is the
program's.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PAYLOAD = 1448 / 1514
"""Share of the data in the frames of a TCP connection with time stamps, at an MTU of 1,500 bytes."""

_BYTES_PER_SECOND = {"gbit": 1e9 / 8, "mbit": 1e6 / 8}

_INSIDE = "MPICOLL_HOSTS_INSIDE"
_ROOT = Path(__file__).resolve().parents[1]

_HOST = """\
set -e
hostname {name}
mount --bind {names} /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""

_AGENT = """\
#!/bin/sh
host=$1
shift
nsenter --target "$(cat {folder}/$host)" --net --uts --ipc --mount --wd="$PWD" sh -c "$*"
status=$?
# As with ssh, the end of a program on a host that is cut off is not reported.
while [ -e {folder}/$host.lost ]; do sleep 0.1; done
exit $status
"""


def parse_rate(text: str) -> float:
    """Return the bytes per second of a `--rate` such as ``1gbit`` or ``200mbit``."""
    unit = next(one for one in _BYTES_PER_SECOND if text.endswith(one))
    return float(text.removesuffix(unit)) * _BYTES_PER_SECOND[unit]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", type=int)
    parser.add_argument("ranks", type=parse_numbers, help="on each host; or a number for each host, with commas")
    parser.add_argument("--rate", help="of each host's link, such as 1gbit; as fast as it goes if left out")
    parser.add_argument("--cut", nargs=2, metavar=("HOST", "FILE"), help="take this host's link away when FILE appears")
    parser.add_argument("--heal", metavar="FILE", help="and give it back when this one does")
    parser.add_argument(
        "--setup", default="", metavar="COMMANDS", help="of the shell, run on each host before the start"
    )
    parser.add_argument("--mpirun", default="", metavar="OPTIONS", help="more options for mpirun, in one word")
    parser.add_argument(
        "--any-interface", action="store_true", help="let MPI select the interfaces; else it is told to use eth0"
    )
    parser.add_argument("--alone", action="store_true", help="run the program once, on the first host, without mpirun")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args()


def parse_numbers(text: str) -> list[int]:
    """Return the numbers in a text such as ``2,1``."""
    return [int(number) for number in text.split(",")]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _make_host(number: int, folder: Path, rate: str | None, setup: str) -> int:
    """A host. Returns the process that holds its namespaces."""
    name = f"h{number}"
    text = _HOST.format(name=name, names=folder / "hosts")
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != b"ready\n":
        raise SystemExit(f"host {name} can't be made; is this root, with the right to make namespaces?")
    pid = str(holder.pid)
    _ip("link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", pid)
    _ip("link", "set", f"port{number}", "master", "switch", "up")
    inside = ["nsenter", "--target", pid, "--net"]
    subprocess.run([*inside, "ip", "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0"], check=True)
    subprocess.run([*inside, "ip", "link", "set", "eth0", "up"], check=True)
    if rate is not None:
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run([*inside, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)
        # What arrives too: that several hosts send to one at a time.
        subprocess.run(["tc", "qdisc", "add", "dev", f"port{number}", *shape], check=True)
    subprocess.run([*inside, "sh", "-ec", setup], check=True, env=os.environ | {"HOST": str(number)})
    (folder / name).write_text(pid)
    return holder.pid


def _cut(folder: Path, host: str, cut: Path, heal: Path | None) -> None:
    lost = folder / f"h{host}.lost"
    _wait_for(cut)
    lost.touch()
    _ip("link", "set", f"port{host}", "down")
    if heal is not None:
        _wait_for(heal)
        _ip("link", "set", f"port{host}", "up")
        lost.unlink()


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def _launch(agent: Path, places: dict[str, int], folder: Path, path: str, *, any_interface: bool) -> list[str]:
    """The launcher in `path`, with its options for so many ranks on each host."""
    environ = os.environ | {"PATH": path}
    answer = subprocess.run(["mpirun", "--version"], check=True, env=environ, stdout=subprocess.PIPE, text=True)
    size = ["-n", str(sum(places.values()))]
    if not re.search("Open MPI|OpenRTE", answer.stdout):
        machines = folder / "machines"
        machines.write_text("".join(f"{name}:{number}\n" for name, number in places.items()))
        program = (
            "mpiexec.hydra" if "Intel" in answer.stdout else "mpirun"
        )  # a script there, which passes on no signals
        return [program, "-launcher", "rsh", "-launcher-exec", str(agent), "-f", str(machines), *size]
    settings = {"plm_ssh_agent": str(agent), "prte_if_include": "10.78.0.0/24"}
    option = "--prtemca"
    if re.search(r"\(Open(RTE| MPI)\) 4", answer.stdout):
        settings = {"plm_rsh_agent": str(agent), "oob_tcp_if_include": "10.78.0.0/24"}
        option = "--mca"
    launcher = ["mpirun", *(word for name, value in settings.items() for word in (option, name, value))]
    launcher += ["--mca", "mpi_yield_when_idle", "1"]
    if not any_interface:
        launcher += ["--mca", "btl_tcp_if_include", "10.78.0.0/24"]
    slots = ",".join(f"{name}:{number}" for name, number in places.items())
    return [*launcher, "--host", slots, "--map-by", "slot:OVERSUBSCRIBE", *size]


def _run(arguments: argparse.Namespace, folder: Path) -> int:
    hosts = [f"h{number}" for number in range(arguments.hosts)]
    lines = ["127.0.0.1 localhost", *(f"10.78.0.{number + 1} {name}" for number, name in enumerate(hosts))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "name", "switch", "type", "bridge")
    _ip("link", "set", "switch", "up")
    first, *_ = [_make_host(number, folder, arguments.rate, arguments.setup) for number in range(arguments.hosts)]
    if arguments.cut is not None:
        host, file = arguments.cut
        heal = None if arguments.heal is None else Path(arguments.heal)
        threading.Thread(target=_cut, args=(folder, host, Path(file), heal), daemon=True).start()
    agent = folder / "agent"
    agent.write_text(_AGENT.format(folder=folder))
    agent.chmod(0o755)
    ranks = arguments.ranks * arguments.hosts if len(arguments.ranks) == 1 else arguments.ranks
    places = dict(zip(hosts, ranks, strict=True))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "ON_HOST": str(agent)} | _choose_yield()
    launcher = []
    if not arguments.alone:
        launcher = _launch(agent, places, folder, path, any_interface=arguments.any_interface)
        launcher += shlex.split(arguments.mpirun)
        variables |= {} if arguments.any_interface else {"FI_TCP_IFACE": "eth0", "UCX_NET_DEVICES": "eth0"}
    command = [*launcher, *arguments.program]
    environment = 'source "$0" && exec nsenter --target "$1" --net --uts --ipc --mount --wd="$PWD" "${@:2}"'
    setting = str(_ROOT / "ci" / "env.sh")
    # Open MPI names its session folders by the ids of processes, which in a namespace of their own are the same in
    # each run: a folder that an earlier run has left behind would stop this one.
    temporary = folder / "tmp"
    temporary.mkdir()
    return subprocess.run(
        ["bash", "-c", environment, setting, str(first), *command],
        check=False,
        env=os.environ | variables | {"TMPDIR": str(temporary)},
    ).returncode


def _choose_yield() -> dict[str, str]:
    """Return how ranks that wait in Open MPI give up their core.

    The ranks of a host are a session, and with autogrouping the kernel divides the cores between sessions. Linux
    6.18.44 lets a session whose processes call sched_yield without end keep a core for a minute: the ranks that it
    waits for have none meanwhile. This does not happen where they sleep for a short time instead.
    """
    switch, name = Path("/proc/sys/kernel/sched_autogroup_enabled"), "OMPI_MCA_threads_pthreads_yield_strategy"
    grouped = switch.exists() and switch.read_text().strip() == "1"
    return {name: "nanosleep"} if grouped and name not in os.environ else {}


def main() -> None:
    arguments = _arguments()
    if not arguments.program:
        raise SystemExit("no program to run; see --help")
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        # When the first process of the new namespace ends, the kernel ends all others in it.
        namespaces = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp("unshare", ["unshare", *namespaces, sys.executable, __file__, *sys.argv[1:]])
    del os.environ[_INSIDE]
    # A host that was cut off may still write there; it ends with this process.
    with tempfile.TemporaryDirectory(prefix="mpicoll-hosts-", ignore_cleanup_errors=True) as folder:
        status = _run(arguments, Path(folder))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
