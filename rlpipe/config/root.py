"""The whole configuration of a run."""

from typing import Self

from pydantic import Field, model_validator

from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import GROUP_ADVANTAGES, AlgorithmConfig
from rlpipe.config.base import Section
from rlpipe.config.data import DataConfig, EvalConfig, EvalDatasetConfig
from rlpipe.config.fault import FaultConfig
from rlpipe.config.jit import JitConfig
from rlpipe.config.model import ModelConfig, PrepareConfig
from rlpipe.config.reward import RewardConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import (
    CheckpointConfig,
    DeadlinesConfig,
    RayConfig,
    RunConfig,
    TraceConfig,
    TrackersConfig,
    WeightSyncConfig,
)
from rlpipe.config.supervised import SupervisedConfig, WarmStartConfig

_SHORT_PROMPT_SHARE = 0.25
"""Of a response. Below it a prompt is computed again for each sample of its group, which is little beside decoding,
rather than that every running request takes five slots for states instead of one."""


class Config(Section):
    """All sections. `rlpipe config FILE` prints them resolved."""

    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and everything else that is random."""

    run: RunConfig
    model: ModelConfig
    prepare: PrepareConfig = PrepareConfig()
    warm_start: WarmStartConfig | None = None
    sft: SupervisedConfig | None = None
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    jit: JitConfig = JitConfig()
    trace: TraceConfig = TraceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    fault: FaultConfig = FaultConfig()
    ray: RayConfig = RayConfig()
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)

    @property
    def longest_training_response_tokens(self) -> int:
        """Token limit of the data set with the highest one."""
        return max(one.sampling.max_response_tokens or self.rollout.max_response_tokens for one in self.data.train)

    @property
    def longest_response_tokens(self) -> int:
        """The same, evaluation included."""
        default = self.eval.max_response_tokens or self.rollout.max_response_tokens
        evaluated = [one.sampling.max_response_tokens or default for one in self.eval.datasets]
        return max(self.longest_training_response_tokens, default, *evaluated)

    @property
    def longest_sequence_tokens(self) -> int:
        """Token limit of a prompt with its response, or of an example of `sft`."""
        return self.sft.max_sequence_tokens if self.sft else self.data.max_prompt_tokens + self.longest_response_tokens

    @property
    def longest_pack_sequence_tokens(self) -> int:
        """The longest sequence that a pack must hold: of responses that are trained, and of examples of `sft`."""
        trained = self.data.max_prompt_tokens + self.longest_training_response_tokens
        return max(trained, self.sft.max_sequence_tokens if self.sft else 0)

    @property
    def needed_gpus(self) -> int:
        """GPUs that the run reserves on GPU nodes: the actor's, and the engines' unless they share them. A supervised
        run has no engines."""
        engines = self.rollout.engines * self.rollout.engine.tensor_parallel
        return self.actor.processes + (0 if self.ray.colocate or self.sft else engines)

    @property
    def uses_stop_strings(self) -> bool:
        """Whether engines have to look at text, which they need the tokenizer for."""
        overrides = [one.sampling.stop for one in self.data.train] + [one.sampling.stop for one in self.eval.datasets]
        return bool(self.rollout.sampling.stop) or any(overrides) or not self.rollout.generate.is_single_turn

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a cache of prefixes is worth its price to engines of a policy with recurrent states: conversations
        with later turns, or prompts that are no small part of a sequence, which the samples of a group share."""
        share = self.data.max_prompt_tokens / self.rollout.max_response_tokens
        return not self.rollout.generate.is_single_turn or share > _SHORT_PROMPT_SHARE

    @property
    def sends_draft_weights(self) -> bool:
        """Whether weight updates hold the multi-token-prediction layer: engines draft with it, and it is trained."""
        return self.rollout.engine.draft.predicts and self.actor.train_mtp

    def due_evaluations(self, iteration: int) -> list[EvalDatasetConfig]:
        """The evaluation sets that are due before the first iteration (0), every few iterations, and after the last."""
        if iteration == 0:
            return self.eval.datasets if self.eval.before_training else []
        intervals = ((one, self.eval.interval_of(one)) for one in self.eval.datasets)
        last = iteration == self.run.iterations
        return [one for one, interval in intervals if last or (interval > 0 and iteration % interval == 0)]

    @property
    def best_metric(self) -> str:
        """Metric by which the best policy is chosen."""
        told = "accuracy" if self.sft is None else "loss"
        return self.checkpoint.best_metric or f"eval/{self.eval.datasets[0].name}/{told}"

    @model_validator(mode="after")
    def _the_best_policy_is_evaluated(self) -> Self:
        if self.checkpoint.save_hf == "best" and not self.eval.datasets:
            raise ValueError(
                "checkpoint.save_hf 'best' goes by an evaluation, but eval.datasets is empty: add one, or set it to "
                "'final' or 'every'"
            )
        known = [
            f"eval/{one.name}/{name}"
            for one in self.eval.datasets
            for name in (
                ("accuracy", "reward_mean", *_passes(self.eval.samples_of(one))) if self.sft is None else ("loss",)
            )
        ]
        if self.checkpoint.best_metric not in (None, *known):
            raise ValueError(
                f"checkpoint.best_metric {self.checkpoint.best_metric!r} is none of the evaluation's metrics: give one "
                f"of {', '.join(known) or 'them, once eval.datasets has a data set'}"
            )
        return self

    @model_validator(mode="after")
    def _a_name_has_one_grader(self) -> Self:
        trained = {dataset.name: dataset.reward for dataset in self.data.train}
        for dataset in self.eval.datasets:
            if trained.get(dataset.name, dataset.reward) != dataset.reward:
                raise ValueError(
                    f"eval.datasets and data.train have a set {dataset.name!r} each, with other graders (`reward`): "
                    "rename one of them"
                )
        return self

    @model_validator(mode="after")
    def _colocated_engines_have_a_process_each(self) -> Self:
        engines, tensor_parallel = self.rollout.engines, self.rollout.engine.tensor_parallel
        if self.ray.colocate and engines * tensor_parallel > self.actor.processes:
            raise ValueError(
                f"ray.colocate needs an actor process for each process of an engine, but rollout.engines ({engines}) x "
                f"rollout.engine.tensor_parallel ({tensor_parallel}) is more than actor.processes "
                f"({self.actor.processes}): lower one of them or raise actor.processes"
            )
        return self

    @model_validator(mode="after")
    def _colocated_engines_wait_for_the_actor(self) -> Self:
        if self.ray.colocate and self.ray.sleep != "never" and self.rollout.mode != "sync":
            raise ValueError(
                f"ray.colocate gives the GPU to engines and actor in turn, but rollout.mode '{self.rollout.mode}' "
                "generates while the actor trains: set rollout.mode to 'sync', ray.colocate to false, or ray.sleep to "
                "'never' where both fit into the GPU's memory"
            )
        return self

    @model_validator(mode="after")
    def _older_samples_are_known_to_be_older(self) -> Self:
        rollout, algorithm = self.rollout, self.algorithm
        ahead = rollout.mode != "sync" or rollout.partial
        if ahead and algorithm.old_policy == "actor" and algorithm.correction.weight == "none":
            if rollout.mask_off_policy and rollout.mode == "sync":
                return self
            raise ValueError(
                f"rollout.mode '{rollout.mode}' (partial: {rollout.partial}) trains on tokens of older weights as if "
                "the present ones had sampled them: set algorithm.old_policy to 'rollout', which takes the ratio "
                "against the weights that did, or algorithm.correction.weight to 'token' or 'sequence'"
            )
        return self

    @model_validator(mode="after")
    def _replayed_routes_are_those_of_the_pack(self) -> Self:
        recompute = self.actor.recompute
        if self.algorithm.routing_replay and recompute.granularity == "selective" and "moe" in recompute.modules:
            raise ValueError(
                "algorithm.routing_replay with actor.recompute.modules 'moe' would compute experts again with another "
                "pack's routes: set actor.recompute.granularity to 'full', or leave 'moe' out of modules"
            )
        return self

    @model_validator(mode="after")
    def _a_sequence_fits_a_pack(self) -> Self:
        longest = self.data.max_prompt_tokens + self.longest_training_response_tokens
        context, multiple = self.actor.parallel.context, self.actor.pack_multiple
        for name in ("max_tokens_per_gpu", "forward_max_tokens_per_gpu"):
            tokens = getattr(self.actor, name) or self.actor.max_tokens_per_gpu
            if tokens == "auto":
                continue
            budget = tokens * context
            if longest > budget // multiple * multiple:
                raise ValueError(
                    f"data.max_prompt_tokens + rollout.max_response_tokens is {longest} tokens, more than the pack "
                    f"budget actor.{name} x context = {budget} in multiples of {multiple}: raise actor.{name} to "
                    f"{-(-longest // multiple) * multiple // context} or shorten the sequences"
                )
        return self

    @model_validator(mode="after")
    def _responses_of_forced_length_are_trained(self) -> Self:
        if not self.rollout.sampling.ignore_eos:
            return self
        overlong = self.algorithm.overlong
        senseless = {
            "rollout.sampling.stop": bool(self.rollout.sampling.stop),
            "rollout.sampling.stop_token_ids": bool(self.rollout.sampling.stop_token_ids),
            "data.train: sampling.stop": any(one.sampling.stop for one in self.data.train),
            "data.train: sampling.stop_token_ids": any(one.sampling.stop_token_ids for one in self.data.train),
            "rollout.generate.function": self.rollout.generate.function in ("environment", "agent", "calculator"),
            "rollout.filters 'truncated'": "truncated" in self.rollout.filters,
            "algorithm.overlong.mask_truncated": overlong.mask_truncated,
            "algorithm.overlong.buffer_tokens": overlong.buffer_tokens > 0,
        }
        for key, is_set in senseless.items():
            if is_set:
                raise ValueError(
                    f"rollout.sampling.ignore_eos lets every response meet its token limit, so {key} would apply to "
                    f"none or to all: remove {key}, or set ignore_eos to false"
                )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        if self.rollout.samples_per_prompt == 1 and self.algorithm.advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"algorithm.advantage '{self.algorithm.advantage}' compares the responses of a group, but "
                "rollout.samples_per_prompt is 1, so every advantage would be 0: raise it, or use 'reinforce_plus_plus'"
            )
        if self.algorithm.updates_per_iteration > self.rollout.prompts_per_iteration:
            raise ValueError(
                f"algorithm.updates_per_iteration is {self.algorithm.updates_per_iteration} but an iteration has only "
                f"{self.rollout.prompts_per_iteration} groups, which are never split over updates: lower it or raise "
                "rollout.prompts_per_iteration"
            )
        if self.algorithm.overlong.buffer_tokens and self.longest_training_response_tokens != _shortest_limit(self):
            raise ValueError(
                "algorithm.overlong.buffer_tokens measures from one token limit, but data sets have different "
                "sampling.max_response_tokens: give all the same, or set buffer_tokens to 0"
            )
        if self.algorithm.overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens is {self.algorithm.overlong.buffer_tokens}, more than "
                f"rollout.max_response_tokens = {self.rollout.max_response_tokens}: every response would be punished"
            )
        return self


def _passes(samples: int) -> list[str]:
    """pass@k for k = 2, 4, ... up to `samples`, the answers to a prompt."""
    return [f"pass_at_{2**power}" for power in range(1, samples.bit_length())]


def _shortest_limit(config: Config) -> int:
    return min(one.sampling.max_response_tokens or config.rollout.max_response_tokens for one in config.data.train)
