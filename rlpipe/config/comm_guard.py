"""The guard against collectives that die for want of device memory."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section


class CommGuardConfig(Section):
    """Whether the actor looks at free device memory before collectives. Collectives of the CPU are never looked at."""

    mode: Literal["off", "observe", "enforce"] = "off"
    """`enforce`: probe as the policy says, clean up when memory is short; `observe`: measure every call, never act."""

    policy: str | None = None
    """File of the policy, made by `rlpipe commguard profile`; that of published evidence when empty."""

    other_stack: Literal["warn", "refuse"] = "warn"
    """What to do about a policy made on another device, driver, NCCL or torch."""

    threshold_share: float | None = Field(None, gt=0, lt=1)
    """Clean up below this share of the device's memory, instead of what the policy says."""

    threshold_bytes: int | None = Field(None, gt=0)
    """The same in bytes; not both."""

    ttl_seconds: float = Field(0.02, ge=0)
    """Age up to which a probe is believed."""

    recovery: float = Field(1.25, ge=1)
    """A shortage is over above this many times the threshold; until then there is no second clean-up."""

    evidence: str | None = None
    """Folder for what `observe` measures, one file for each rank."""

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if self.threshold_share is not None and self.threshold_bytes is not None:
            raise ValueError("actor.comm_guard has both threshold_share and threshold_bytes: leave one of them empty")
        return self
