"""Jobs of a run in Slurm's queue, by the run's name."""

from dataclasses import dataclass
from pathlib import Path

from rlpipe.commands.launch.scheduler_program import output_of
from rlpipe.shared.errors import ResourceError

_FIELDS = ("JobID", "State", "Reason", "RestartCnt", "TimeUsed", "TimeLeft", "NodeList", "WorkDir")
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_RUNNING = frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING"})


@dataclass(frozen=True)
class SlurmJob:
    """One row of squeue; times as Slurm writes them."""

    number: str
    state: str
    reason: str
    restarts: str
    used: str
    left: str
    nodes: str
    folder: str

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes else ""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        times = f", running for {self.used}, {self.left} left" if self.state in _RUNNING else ""
        again = f", restarted {self.restarts} times" if self.restarts != "0" else ""
        return f"job {self.number}: {self.state}{why}{where}{times}{again}"


class SlurmJobs:
    """The caller's jobs of the run `name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def describe(self) -> list[str]:
        """A line for each job that Slurm still knows, and where its output is."""
        lines = []
        for job in self._found():
            folder = Path(job.folder)
            lines.append(str(job))
            lines.append(f"output: {folder / f'slurm-{job.number}.log'}, {folder / 'slurm-logs' / job.number}")
        return lines or [f"Slurm has no job of the run {self._name}: it has ended, or was not launched"]

    def cancel(self, now: bool) -> list[str]:
        """End them: the script of a running job has its driver save first, unless `now`."""
        done = []
        for job in self._active():
            if now or job.state in _WAITING:
                output_of("scancel", job.number)
                done.append(f"job {job.number}: ended")
            else:
                output_of("scancel", "--batch", "--signal=USR2", job.number)
                done.append(f"job {job.number}: saves a checkpoint, then ends")
        return done

    def requeue(self) -> list[str]:
        """Let running jobs save and wait in the queue again; those that wait are left alone."""
        done = []
        for job in self._active():
            if job.state in _WAITING:
                done.append(f"job {job.number}: waits already")
            else:
                output_of("scancel", "--batch", "--signal=USR1", job.number)
                done.append(f"job {job.number}: saves a checkpoint, then goes back into the queue")
        return done

    def _active(self) -> list[SlurmJob]:
        found = [job for job in self._found() if job.state in _WAITING | _RUNNING]
        if not found:
            raise ResourceError(f"Slurm has no job of the run {self._name} that waits or runs; nothing was done")
        return found

    def _found(self) -> list[SlurmJob]:
        columns = ",".join(f"{field}:|" for field in _FIELDS)
        rows = output_of(
            "squeue", "--me", f"--name={self._name}", "--states=all", "--noheader", f"--Format={columns}"
        ).splitlines()
        return [SlurmJob(*(value.strip() for value in row.split("|")[: len(_FIELDS)])) for row in rows if row.strip()]
