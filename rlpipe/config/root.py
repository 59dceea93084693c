"""The whole configuration of a run."""

from typing import Self

from pydantic import Field, model_validator

from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.base import Section
from rlpipe.config.data import DataConfig, EvalConfig
from rlpipe.config.model import ModelConfig, PrepareConfig, WarmStartConfig
from rlpipe.config.reward import RewardConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import (
    CheckpointConfig,
    DeadlinesConfig,
    RayConfig,
    RunConfig,
    TrackersConfig,
    WeightSyncConfig,
)


class Config(Section):
    """All sections. `rlpipe config FILE` prints them resolved."""

    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and everything else that is random."""

    run: RunConfig
    model: ModelConfig
    prepare: PrepareConfig = PrepareConfig()
    warm_start: WarmStartConfig | None = None
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    ray: RayConfig = RayConfig()
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)

    @model_validator(mode="after")
    def _a_sequence_fits_a_pack(self) -> Self:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        budget = self.actor.max_tokens_per_gpu * self.actor.parallel.context
        if longest > budget:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_response_tokens is {longest} tokens, more than the pack budget "
                f"actor.max_tokens_per_gpu x context = {budget}: raise actor.max_tokens_per_gpu to "
                f"{-(-longest // self.actor.parallel.context)} or shorten the sequences"
            )
        return self
