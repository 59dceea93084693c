"""Adapters as rollout engines take them: which an engine can keep apart from the model, and what is sent of these.
Pure: imports no torch.

SGLang keeps a pool of adapters beside the model. It fuses q, k and v, and gate and up, and wants factors for all of a
fused projection once one of them has some; those without an adapter get zeros.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actor.hf.adapter_table import AdaptedWeight
from actor.hf.weight_table import Source
from rlpipe.config.lora import LoraConfig
from rlpipe.model.description import TrainableModel
from rlpipe.shared.weights import ADAPTER_ROOT, EngineAdapter

_FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Whose adapters SGLang 0.5.17 serves exactly. It takes gated attention for narrower than it is, and knows no adapters
of the small projections of Gated DeltaNet."""

_ATTENTION = ("linear_qkv.weight", "linear_proj.weight")
_DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


@dataclass(frozen=True)
class EngineFactor:
    """One factor of a projection in PEFT's layout; one that is not trained is all zeros."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool


def engine_refusal(model: TrainableModel, table: Sequence[AdaptedWeight]) -> str:
    """Why engines cannot keep these adapters apart from the model; empty where they can."""
    if model.architecture not in _FAMILIES:
        return f"engines do not serve adapters of {model.architecture} exactly"
    # Once gate, up and down are adapted anywhere, SGLang looks for adapters of routed experts, too.
    served = _ATTENTION if model.experts is not None else (*_ATTENTION, *_DENSE)
    others = [one for one in table if not one.weight.target.endswith(served)]
    names = sorted({_last(source) for one in others for source in one.weight.sources})
    return f"engines serve no adapters of {', '.join(names)} of {model.architecture}" if names else ""


def engine_adapter(lora: LoraConfig, table: Sequence[AdaptedWeight]) -> EngineAdapter:
    """The room that an engine needs for them."""
    modules = {_last(source) for one in table for source in one.weight.sources}
    return EngineAdapter(lora.rank, lora.scale, tuple(sorted(modules)))


def engine_factors(one: AdaptedWeight, rank: int) -> Iterator[EngineFactor]:
    """Of a weight first those of its `a`, then those of its `b`."""
    pairs = list(zip(one.weight.sources, one.slots, strict=True))
    for source, slot in pairs:
        yield EngineFactor(_named(source, "lora_A"), (rank, source.shape[1]), slot is not None)
    for source, slot in pairs:
        yield EngineFactor(_named(source, "lora_B"), (source.shape[0], rank), slot is not None)


def _named(source: Source, factor: str) -> str:
    return f"{ADAPTER_ROOT}{source.name.removesuffix('.weight')}.{factor}.weight"


def _last(source: Source) -> str:
    return source.name.removesuffix(".weight").rsplit(".", 1)[-1]
