"""Just-in-time compilation: where its results are kept, when it is expected, what happens when it is not."""

from typing import Literal

from pydantic import Field, field_validator

from rlpipe.config.base import Section


class JitConfig(Section):
    """Kernels compile when they first meet a new shape: in the first iteration, never in later ones."""

    after_warmup: Literal["warn", "error"] = "warn"
    """What a compilation after the warm-up iterations does: a warning that names the kernel, or the end of the run."""

    warmup_iterations: int = Field(1, ge=0)
    """First iterations of a process in which compiling is expected."""

    warm_up: Literal["auto", "on", "off"] = "auto"
    """Meet every class of pack in the actor and every class of batch in the engines before the first iteration; `auto`
    does so on a GPU."""

    stall_factor: float = Field(5.0, gt=1)
    """The stacks of a worker are written to the run's logs when a call takes this many times the median."""

    stall_minimum_seconds: float = Field(60.0, gt=0)
    """Calls shorter than this are never stalled."""

    cache_directory: str | None = None
    """Folder on each node's own disk that keeps compiled kernels between runs; on a GPU, when empty,
    `~/.cache/rlpipe/jit`."""

    @field_validator("warm_up", mode="before")
    @classmethod
    def _yaml_reads_on_and_off_as_booleans(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    def warms_up(self, on_gpu: bool) -> bool:
        """Whether a worker does, on a GPU or on a CPU."""
        return self.warm_up == "on" or (self.warm_up == "auto" and on_gpu)
