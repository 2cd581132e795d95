"""Two machines on one: network namespaces joined by a cable, and a Slurm that starts jobs on them.

The machines' own names lead to the loopback, as in Debian's /etc/hosts. Where no namespaces may be
made, both are this machine, and talk over its loopback.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'

SRUN = """\
import argparse, json, os, subprocess, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)  # refuses options that it does not know
parser.add_argument("--kill-on-bad-exit", type=int, required=True)
parser.add_argument("--cpus-per-task", type=int, required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
command, tasks = parser.parse_args().command, []
for number, enter in enumerate(json.loads(os.environ["NODES"])):
    mine = {"SLURM_NODEID": number, "SLURM_PROCID": number, "SLURM_LOCALID": 0}
    mine = {name: str(value) for name, value in mine.items()}
    tasks.append(subprocess.Popen([*enter, *command], env=os.environ | mine))
while any(task.poll() is None for task in tasks) and not any(task.poll() for task in tasks):
    time.sleep(0.1)
for task in tasks:
    task.terminate()
sys.exit(max(abs(task.wait()) for task in tasks))
"""

SCONTROL = """\
import os, sys
assert sys.argv[1:] == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
print(*os.environ["SLURM_JOB_NODELIST"].split(","), sep="\\n")
"""


@dataclass(frozen=True)
class Node:
    """A machine."""

    name: str
    """Its name, as other machines know it."""
    enter: tuple[str, ...]
    """What stands before a command that runs there."""


@contextmanager
def two_nodes(folder: Path) -> Iterator[list[Node]]:
    """Two machines with a common disk; their files of names are written into `folder`."""
    spaces = [f"lcx{os.getpid()}n{number}" for number in range(2)]
    try:
        if _join(*spaces):
            yield [_node(folder, number, space) for number, space in enumerate(spaces)]
        else:
            yield [Node("localhost", ())] * 2
    finally:
        for space in spaces:
            _ip("netns", "delete", space)


def run_job(folder: Path, nodes: list[Node], script: Path, *arguments: str) -> tuple[int, str]:
    """Run a batch script of Slurm in `folder`; returns its exit code and what all tasks said."""
    tools = folder / "slurm_bin"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(f"#!{sys.executable}\n{text}")
        (tools / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": ",".join(node.name for node in nodes),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_CPUS_PER_TASK": "1",
    }
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours = {"PATH": path, "NODES": json.dumps([n.enter for n in nodes]), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        ["bash", str(script), *arguments],
        cwd=folder,
        env=os.environ | slurm | ours | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = job.communicate(timeout=200)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, said


def _join(one: str, other: str) -> bool:
    """Make two namespaces with a cable between them; False where that is not allowed."""
    commands = [f"netns add {one}", f"netns add {other}"]
    commands += [f"link add eth0 netns {one} type veth peer name eth0 netns {other}"]
    for number, space in enumerate((one, other), start=1):
        commands += [f"-n {space} address add 10.77.0.{number}/24 dev eth0"]
        commands += [f"-n {space} link set {name} up" for name in ("lo", "eth0")]
        commands += [f"-n {space} route add default dev eth0"]
    return all(_ip(*command.split()) for command in commands)


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _node(folder: Path, number: int, space: str) -> Node:
    names = ["node0", "node1"]
    others = [f"10.77.0.{n + 1} {name}" for n, name in enumerate(names) if n != number]
    hosts = folder / f"hosts_of_{names[number]}"
    hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {names[number]}", *others]))
    enter = ("ip", "netns", "exec", space, "unshare", "--uts", "--mount", "bash", "-c", ENTER)
    return Node(names[number], (*enter, names[number], str(hosts)))
