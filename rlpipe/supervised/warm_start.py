"""A short supervised phase before GRPO, by the same actor, on answers made from the training rows."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpipe.batching.pack_plan import flops_cost
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.supervised import WarmStartConfig
from rlpipe.data.special_text import SpecialText
from rlpipe.generation.inputs import Inputs
from rlpipe.monitoring.console import Console, TaskProgress
from rlpipe.supervised.examples import answer_sequence
from rlpipe.supervised.supervised_packs import supervised_packs

if TYPE_CHECKING:
    from actor.group import ActorGroup


@dataclass(frozen=True)
class WarmStartResult:
    """Steps taken, and the loss of the last one in nats per answer token."""

    steps: int
    loss: float


def warm_start(inputs: Inputs, settings: WarmStartConfig, actor: "ActorGroup", console: Console) -> WarmStartResult:
    """Supervised steps until `settings.steps` or `stop_at_loss`, then a fresh optimizer for GRPO."""
    config = inputs.config
    actor.reset_optimizer(_optimizer(settings), settings.steps)
    batches = _batches(inputs, settings)
    cost = flops_cost(config.model.path)
    loss = math.inf
    step = 0
    while step < settings.steps and loss > settings.stop_at_loss:
        packs = supervised_packs(next(batches), config.actor, data_parallel=actor.layout.data_parallel, cost=cost)
        loss = actor.train(packs.ranks, AlgorithmConfig(loss="sft")).metrics["train/loss"]
        step += 1
        console.progress(TaskProgress(step, settings.steps))
    actor.reset_optimizer(config.actor.optimizer, config.run.iterations * config.algorithm.updates_per_iteration)
    actor.set_reference()
    return WarmStartResult(step, loss)


def _batches(inputs: Inputs, settings: WarmStartConfig) -> Iterator[list[TrainingSequence]]:
    prompts = inputs.training.prompts
    generator = random.Random(f"warm start {inputs.config.seed}")
    special = SpecialText(inputs.tokenizer)
    hides = {data.name: None if data.allow_special_tokens else special for data in inputs.config.data.train}
    while True:
        chosen = generator.sample(prompts, min(settings.sequences_per_step, len(prompts)))
        yield [
            answer_sequence(prompt, settings.response_template, inputs.tokenizer, hides[prompt.dataset])
            for prompt in chosen
        ]


def _optimizer(settings: WarmStartConfig) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=settings.learning_rate, warmup_steps=settings.warmup_steps)
