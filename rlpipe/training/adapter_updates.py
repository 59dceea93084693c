"""How adapters reach the engines: merged into the weights, or alone, to engines that keep them beside the model."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from actor.hf.adapter_table import adapter_table
from actor.hf.engine_adapters import engine_adapter, engine_refusal
from rlpipe.config.load import load_config, merge, validate
from rlpipe.config.root import Config
from rlpipe.config.run import AdapterUpdates
from rlpipe.config.save import resolved_yaml
from rlpipe.model.hub import model_folder
from rlpipe.model.model_reader import trainable_model
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.weights import EngineAdapter
from rlpipe.training.placement import cluster_gpus
from rlpipe.training.weight_sync import WeightSync
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, SamplingParameters

_TRIAL_TOKENS = 32
_TRIAL_SECONDS = 600.0


def check_adapter_updates(config: Config) -> None:
    """Raise ConfigError where adapters cannot go to the engines alone and are to. Ray need not be there."""
    if config.weight_sync.adapters == "alone":
        reason = _refusal(config, config.ray.colocate and config.ray.sleep == "always")
        if reason:
            raise ConfigError(f"weight_sync.adapters is 'alone', but {reason}: set it to 'merged'")


def engine_room(config: Config) -> EngineAdapter | None:
    """The adapter for which engines keep room; None where weights come merged. Ray must be initialised.

    Raises:
        ConfigError: adapters are to go alone and cannot.
    """
    lora = config.actor.lora
    if config.weight_sync.adapters == "merged" or lora is None:
        return None
    reason = _refusal(config, config.ray.shares_memory(gpus=cluster_gpus() > 0))
    if reason and config.weight_sync.adapters == "alone":
        raise ConfigError(f"weight_sync.adapters is 'alone', but {reason}: set it to 'merged'")
    policy = trainable_model(model_folder(config.model.path))
    return None if reason else engine_adapter(lora, adapter_table(policy, lora, padded_vocab_size=policy.vocab_size))


def merged_note(config: Config) -> tuple[str, ...]:
    """Why `auto` does not even try to send adapters alone, for the user. Ray must be initialised."""
    if config.actor.lora is None or config.weight_sync.adapters != "auto":
        return ()
    reason = _refusal(config, config.ray.shares_memory(gpus=cluster_gpus() > 0))
    return (f"engines get weights with the adapters merged: {reason}",) if reason else ()


def with_saved_choice(config: Config, resume: bool) -> Config:
    """A resumed run keeps the way that it began with, which changes the last bits of what engines generate."""
    saved = RunDirectory.of(config).config
    if not resume or config.weight_sync.adapters != "auto" or not saved.exists():
        return config
    return _with(config, load_config(saved).weight_sync.adapters)


def with_measured_choice(
    config: Config, weights: WeightSync, pool: RolloutPool, version: int, say: Callable[[str], None]
) -> Config:
    """`config` with the faster way in place of `auto`, which the run's folder then says too. The engines hold weights
    of `version` afterwards, sent the other way perhaps."""
    if config.weight_sync.adapters != "auto" or not weights.can_send_adapters:
        return config
    trials = {way: _trial(config, weights, pool, version, way) for way in ("alone", "merged")}
    way: AdapterUpdates = "alone" if trials["alone"].seconds < trials["merged"].seconds else "merged"
    pool.take_usage()  # belongs to no iteration
    chosen = _with(config, way)
    write_atomically(RunDirectory.of(config).config, resolved_yaml(chosen).encode())
    say(f"adapters go to the engines {way}: alone {trials['alone']}; merged {trials['merged']}")
    return chosen


@dataclass(frozen=True)
class _Trial:
    """iteration_tokens: of all responses of an iteration, each of the longest length."""

    update_seconds: float
    update_bytes: float
    tokens_per_second: float
    iteration_tokens: int

    @property
    def seconds(self) -> float:
        """Of an update and the generation after it."""
        return self.update_seconds + self.iteration_tokens / self.tokens_per_second

    def __str__(self) -> str:
        megabytes = self.update_bytes / 1e6
        return f"{self.update_seconds:.2f} s for {megabytes:,.1f} MB, {self.tokens_per_second:,.0f} tokens/s"


def _trial(config: Config, weights: WeightSync, pool: RolloutPool, version: int, way: AdapterUpdates) -> _Trial:
    weights.adapters_alone = way == "alone"
    weights.push(version)  # brings what later updates find there
    begin = time.perf_counter()
    size = weights.push(version)["weight_sync/bytes"]
    seconds = time.perf_counter() - begin
    _generate(config, pool)
    begin = time.perf_counter()
    tokens = _generate(config, pool)
    speed = tokens / (time.perf_counter() - begin)
    responses = config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt
    return _Trial(seconds, size, speed, responses * config.longest_training_response_tokens)


def _generate(config: Config, pool: RolloutPool) -> int:
    """Tokens of as many short responses as engines can write at a time."""
    rollout = config.rollout
    responses = rollout.prompts_per_iteration * rollout.samples_per_prompt
    count = min(responses, rollout.engines * rollout.engine.max_running_requests)
    sampling = SamplingParameters(min(_TRIAL_TOKENS, config.longest_training_response_tokens), ignore_eos=True)
    requests = [GenerateRequest(f"trial-{index}", (1 + index % 64,) * 8, sampling, index) for index in range(count)]
    client = pool.client()

    async def all_tokens() -> int:
        return sum(len(one.token_ids) for one in await asyncio.gather(*map(client.generate, requests)))

    try:
        return asyncio.run(asyncio.wait_for(all_tokens(), _TRIAL_SECONDS))
    finally:
        client.close()


def _refusal(config: Config, shares_memory: bool) -> str:
    """Why adapters cannot go to the engines alone; empty where they can."""
    lora = config.actor.lora
    if lora is None:
        return "there are none (actor.lora)"
    if config.rollout.engine.quantization != "none" or config.rollout.engine.draft.method != "off":
        return "engines in 8 bits, and engines that draft, serve no adapters (rollout.engine.quantization and draft)"
    if shares_memory:
        return "colocated engines give their weights back in every iteration and need them all again (ray.sleep)"
    policy = trainable_model(model_folder(config.model.path))
    return engine_refusal(policy, adapter_table(policy, lora, padded_vocab_size=policy.vocab_size))


def _with(config: Config, way: AdapterUpdates) -> Config:
    return validate(merge(config.model_dump(), {"weight_sync": {"adapters": way}}), "the measured choice")
