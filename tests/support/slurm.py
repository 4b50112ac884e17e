"""A private Slurm cluster: real daemons of Debian, with ports and folders of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.children import Process
from support.missing import skip_here
from support.ports import free_port
from support.processes import run_program
from support.waiting import await_truth

#: Seconds between the notice of a preemption and the end.
GRACE_SECONDS = 60
#: Daemons lie where only administrators look for programs.
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_CONFIGURATION = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
{nodes}
PartitionName=spot Nodes={names} PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=urgent Nodes={names} PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=closed Nodes={names} PriorityTier=1 State=DOWN
"""


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue lists it."""

    id: str
    state: str
    name: str
    node: str


@dataclass
class SlurmCluster:
    """A cluster of nodes that are all this machine. Partition urgent preempts partition spot."""

    folder: Path
    configuration: Path
    nodes: tuple[str, ...]

    def run(self, *argv: str, given: str = "") -> str:
        env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.configuration)}
        done = run_program(argv, input=given, env=env)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def jobs(self) -> list[SlurmJob]:
        """Return the jobs that have not ended."""
        lines = self.run("squeue", "-h", "-r", "-o", "%i|%T|%N|%j").splitlines()
        rows = (line.split("|", 3) for line in lines)
        return [SlurmJob(id_, state, name, node) for id_, state, node, name in rows]

    def machines(self, state: str = "RUNNING") -> list[SlurmJob]:
        """Return the jobs of pools in a state."""
        return [job for job in self.jobs() if job.name.startswith("vcasgd/") and job.state == state]

    def preempt(self, job: SlurmJob) -> str:
        """Submit a job that preempts another one, and wait until it runs. Return its id."""
        script = "#!/bin/sh\nexec sleep 600\n"
        where = [f"--nodelist={job.node}", "--partition=urgent", "--output=/dev/null"]
        urgent = self.run("sbatch", "--parsable", "--chdir=/tmp", *where, given=script).strip()
        await_truth(lambda: self._runs(urgent), GRACE_SECONDS * 2, interval=0.2)
        assert all(each.id != job.id for each in self.jobs()), "it was requeued"
        return urgent

    def occupy(self) -> str:
        """Take all nodes, so that jobs of pools wait; return the id of the array."""
        script, count = "#!/bin/sh\nexec sleep 600\n", len(self.nodes)
        where = ["--partition=urgent", f"--array=0-{count - 1}", "--output=/dev/null"]
        array = self.run("sbatch", "--parsable", "--chdir=/tmp", *where, given=script).strip()
        tasks = [f"{array}_{task}" for task in range(count)]
        await_truth(lambda: all(map(self._runs, tasks)), GRACE_SECONDS * 2, interval=0.2)
        return array

    def cancel(self, job: str) -> None:
        self.run("scancel", job)
        await_truth(lambda: all(each.id != job for each in self.jobs()), interval=0.2)

    def _runs(self, job: str) -> bool:
        return any(each.id == job and each.state == "RUNNING" for each in self.jobs())

    def node_states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", "spot", "-o", "%t").split()


@contextlib.contextmanager
def slurm_cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Run a cluster with nodes of one processor. Skip the test where there is no Slurm."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    if missing := [each for each in programs if shutil.which(each, path=_PATH) is None]:
        skip_here(f"there is no Slurm here: {', '.join(missing)} not found")
    # Not in the test's folder, whose path may be too long for sockets.
    with tempfile.TemporaryDirectory(prefix="vcasgd-slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = _configure(folder, tuple(f"n{number + 1}" for number in range(nodes)))
        daemons: list[Process] = []
        try:
            daemons.append(_start(cluster, "munged", *_munge_arguments(folder)))
            await_truth((folder / "munge.sock").exists)
            daemons.append(_start(cluster, "slurmctld", "-D", "-c"))
            daemons += [_start(cluster, "slurmd", "-D", "-N", node) for node in cluster.nodes]
            await_truth(lambda: cluster.node_states() == ["idle"] * nodes, interval=0.2)
            yield cluster
        finally:
            # the nodes first, whose jobs then end
            for daemon in reversed(daemons):
                daemon.terminate()


def _configure(folder: Path, nodes: tuple[str, ...]) -> SlurmCluster:
    host = socket.gethostname().partition(".")[0]
    rows = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 "
        "RealMemory=100 State=UNKNOWN"
        for node in nodes
    ]
    for each in ("state", *(f"spool.{node}" for node in nodes)):
        (folder / each).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=host,
            controller_port=free_port(),
            user=getpass.getuser(),
            folder=folder,
            nodes="\n".join(rows),
            names=",".join(nodes),
            grace=GRACE_SECONDS,
        )
    )
    return SlurmCluster(folder, configuration, nodes)


def _munge_arguments(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    files = {
        "key-file": key,
        "socket": folder / "munge.sock",
        "pid-file": folder / "munged.pid",
        "seed-file": folder / "munged.seed",
    }
    options = [f"--{option}={path}" for option, path in files.items()]
    return ["--foreground", "--force", "--num-threads=1", *options]


def _start(cluster: SlurmCluster, program: str, *arguments: str) -> Process:
    path = shutil.which(program, path=_PATH)
    assert path is not None
    log = cluster.folder / f"{program}-{'-'.join(arguments[-1:]).strip('-').replace('/', '_')}.log"
    env = {"PATH": _PATH, "SLURM_CONF": str(cluster.configuration)}
    return Process([path, *arguments], log, env)
