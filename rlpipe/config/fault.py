"""What a run survives, and how long it may take to stop."""

from typing import Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section


class FaultConfig(Section):
    """Lost processes: how they are noticed, and how often they are replaced before the run ends (docs/faults.md)."""

    engine_restarts: int = Field(10, ge=0)
    """Restarts of rollout engines that are allowed within an hour, all engines together; the failure after the last one
    ends the run, and with 0 the first one does."""

    engine_probe_seconds: float = Field(1.0, gt=0)
    """Every engine gets a health probe this often, beside generation."""

    engine_probe_deadline_seconds: float = Field(2.0, gt=0)
    """A probe that is not answered within it counts as missed."""

    engine_probes: int = Field(5, ge=1)
    """Probes that are looked at together."""

    engine_missed_probes: int = Field(3, ge=1)
    """An engine that missed this many of its last `engine_probes` is looked at from outside. Where a process of it is
    stopped it is restarted at once; where all run it may be slow, and is given `engine_hang_seconds`."""

    engine_hang_seconds: float = Field(300.0, gt=0)
    """An engine that answers nothing for so long, although its processes run, is restarted. Compiling kernels can take
    minutes."""

    actor_restarts: int = Field(0, ge=0)
    """How often in all a lost actor (a process died or hangs, a collective failed) is started again, from the last
    checkpoint or, where there is none, from the run's beginning. Later iterations are done again, on the same data."""

    probe_seconds: float = Field(5.0, gt=0)
    """While a call of the actor runs, its processes are looked at this often; one that a signal has stopped, or that
    is gone after its answer, is lost when it is found so twice in a row."""

    grace_seconds: float = Field(60.0, ge=0)
    """On SIGTERM or Ctrl-C: the longest time to end an update that has begun and to save a checkpoint. 0 saves none."""

    @model_validator(mode="after")
    def _so_many_probes_can_be_missed(self) -> Self:
        if self.engine_missed_probes > self.engine_probes:
            raise ValueError(
                f"fault.engine_missed_probes is {self.engine_missed_probes}, more than the fault.engine_probes = "
                f"{self.engine_probes} that are looked at: lower it or raise engine_probes"
            )
        return self
