"""The loss on rows that are not trained, by the actor that trains."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlpipe.batching import PackLimits, pack_sequences
from rlpipe.batching.pack_plan import flops_cost
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig
from rlpipe.supervised.examples import Examples
from rlpipe.supervised.supervised_packs import wrap

if TYPE_CHECKING:
    from actor.group import ActorGroup


class HeldOutLoss:
    """The evaluation sets of a supervised run, each with its own cadence."""

    def __init__(self, config: Config, settings: SupervisedConfig, examples: Mapping[str, Examples]) -> None:
        self._config = config
        self._settings = settings
        self._examples = examples
        self._cost = flops_cost(config.model.path)

    def is_due(self, iteration: int) -> bool:
        """Whether any set is to be evaluated after `iteration`."""
        return bool(self._config.due_evaluations(iteration))

    def run(self, iteration: int, actor: "ActorGroup") -> dict[str, float]:
        """`eval/{dataset}/loss` of the sets that are due after `iteration`, in nats per trained token."""
        due = self._config.due_evaluations(iteration)
        return {f"eval/{one.name}/loss": self._loss(self._examples[one.name], actor) for one in due}

    def _loss(self, examples: Examples, actor: "ActorGroup") -> float:
        """As many sequences a call as an optimizer step has, so that no call takes longer than one."""
        limits = PackLimits.forward_only(self._config.actor)
        total, tokens, sequences = 0.0, 0.0, examples.sequences
        some = self._settings.sequences_per_step
        for start in range(0, len(sequences), some):
            laid = sequences[start : start + some]
            if self._settings.packing == "wrapped":
                laid = list(wrap(laid, limits.capacity_tokens))
            packs = pack_sequences(laid, limits, data_parallel=actor.layout.data_parallel, cost=self._cost)
            answers = actor.logprobs([[pack for step in rank for pack in step] for rank in packs.ranks])
            total -= sum(float(logprobs.sum(dtype="float64")) for rank in answers for logprobs in rank)
            tokens += sum(float(sequence.loss_mask.sum()) for sequence in laid)
        return total / tokens
