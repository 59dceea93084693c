"""A Slurm of its own: munge with a new key, a controller and two nodes, each in a network namespace. Needs root and the
packages `slurm-wlm` and `munge` of Debian; touches nothing outside its folder.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from network_hosts import Host, hosts
from network_hosts import reason_not_possible as reason_without_namespaces

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
_ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"})
_START_SECONDS = 120
_CONFIGURATION = """
ClusterName=throwaway
SlurmctldHost=localhost({head})
SlurmUser=root
AuthType=auth/munge
# A requeued job waits for its old credential to expire; 120 seconds otherwise.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
MinJobAge=7200
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster of the nodes node1, node2, ... on `hosts`."""

    folder: Path
    hosts: tuple[Host, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's programs find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, command: Sequence[str], check: bool = True, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command on the first node."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.hosts[0].namespace, *command],
            env={**os.environ, **self.environment, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_SECONDS,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows about a job."""
        shown = self.run(["scontrol", "show", "job", number, "--oneliner"]).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def ended(self, number: str) -> bool:
        """Whether the job neither runs nor waits."""
        return self.job(number)["JobState"] in _ENDED

    def wait_for(self, what: Callable[[], object], seconds: float, told: Callable[[], str]) -> None:
        """Until `what` is true; `told` is the failure's text."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, told()
            time.sleep(0.3)


def reason_not_possible() -> str | None:
    """Why no Slurm can be started here; None when one can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed here ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    return reason_without_namespaces()


@contextmanager
def slurm(nodes: int = 2) -> Iterator[Slurm]:
    """Until the block ends, with its jobs."""
    with hosts(nodes) as made, _folder() as folder, _daemons() as start:
        cluster = Slurm(folder, tuple(made))
        (folder / "slurm.conf").write_text(_configuration(folder, made))
        # No job is confined here, and the machine's own control groups are left alone.
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")
        start(made[0].start(_tied(_munged(folder)), folder / "munged.out"))
        cluster.wait_for((folder / "munge" / "socket").exists, _START_SECONDS, (folder / "munged.out").read_text)
        options = ["-D", "-f", str(folder / "slurm.conf")]
        start(made[0].start(_tied(["slurmctld", *options]), folder / "slurmctld.out", **cluster.environment))
        for number, host in enumerate(made, 1):
            command = _tied(["slurmd", *options, "-N", f"node{number}"])
            start(host.start(command, folder / f"slurmd{number}.out", **cluster.environment))

        def idle() -> bool:
            return cluster.run(["sinfo", "--noheader", "--format=%T %D"], check=False).stdout.split() == [
                "idle",
                str(nodes),
            ]

        cluster.wait_for(idle, _START_SECONDS, lambda: _logs(folder))
        try:
            yield cluster
        finally:
            cluster.run(["scancel", "--me"], check=False)
            for _ in range(100):
                if not cluster.run(["squeue", "--noheader"], check=False).stdout:
                    break
                time.sleep(0.3)


def _configuration(folder: Path, made: Sequence[Host]) -> str:
    lines = [
        f"NodeName=node{number} NodeAddr={host.address} CPUs=1 RealMemory=16000 Feature=fast State=UNKNOWN"
        for number, host in enumerate(made, 1)
    ]
    return _CONFIGURATION.format(folder=folder, head=made[0].address, nodes="\n".join(lines))


def _munged(folder: Path) -> list[str]:
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    places = {"key-file": key, "seed-file": folder / "seed", "log-file": folder / "munged.log"}
    (folder / "munge").mkdir(mode=0o755)
    places |= {"socket": folder / "munge" / "socket", "pid-file": folder / "munge" / "pid"}
    return ["munged", "--foreground", *(f"--{name}={path}" for name, path in places.items())]


def _tied(command: list[str]) -> list[str]:
    """A program that ends with the tests, even where those are killed."""
    return ["setpriv", "--pdeathsig", "TERM", *command]


@contextmanager
def _folder() -> Iterator[Path]:
    """Short, because names of sockets lie below it; all may search it, as munge asks."""
    folder = Path(tempfile.mkdtemp(prefix="rlps-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _daemons() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Takes processes, and ends them in reverse order."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started.append
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log")))
