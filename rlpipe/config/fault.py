"""What a run survives, and how long it may take to stop."""

from pydantic import Field

from rlpipe.config.base import Section


class FaultConfig(Section):
    """Lost processes: how they are noticed, and how often they are replaced before the run ends."""

    actor_restarts: int = Field(0, ge=0)
    """How often in all a lost actor (a process that died or hangs, a failed collective) is started again from the last
    checkpoint, or from the run's beginning where there is none. Iterations after it are done again, on the same data."""

    probe_seconds: float = Field(10.0, gt=0)
    """Processes that work for long are asked this often whether they are alive."""

    probe_failures: int = Field(4, ge=1)
    """A process that has left so many of these questions in a row unanswered hangs."""

    grace_seconds: float = Field(60.0, ge=0)
    """On SIGTERM or Ctrl-C: the longest time to end an update that has begun and to save a checkpoint. 0 saves none."""
