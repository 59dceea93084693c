"""Which share of the policy a run trains, and what of the work of training everything that saves."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from actor.hf.adapter_table import AdaptedWeight, adapter_table, factor_elements
from actor.hf.weight_table import export_plan
from rlpipe.config.lora import LoraConfig
from rlpipe.config.root import Config
from rlpipe.estimate.memory import Model, load_model, path_or_bundled
from rlpipe.estimate.parameters import Parameters
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.trained import UntrainedWork, idle_layers, weight_flops, weight_gradient_flops
from rlpipe.model.config_file import read_config
from rlpipe.model.description import TrainableModel
from rlpipe.model.model_reader import trainable_model

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EMBEDDING = "embed_tokens.weight"


def trained_notes(config: Config) -> tuple[str, ...]:
    """One sentence on the adapters that are trained; none without them."""
    lora = config.actor.lora
    if lora is None:
        return ()
    policy = trainable_model(config.model.path)
    table = _adapters(policy, lora)
    trained, frozen = sum(one.parameters for one in table), sum(tensor.elements for tensor in export_plan(policy))
    projections = sum(slot is not None for one in table for slot in one.slots)
    base = ", their projections in 8 bits" if lora.base == "float8" else ""
    note = (
        f"LoRA of rank {lora.rank} on {projections} projections: {trained:,} parameters are trained, {frozen:,} are "
        f"frozen{base} ({trained / (trained + frozen):.3%} of all are trained)"
    )
    return (note,)


def planned_model(config: Config) -> Model:
    """The model for `rlpipe.estimate`, with the adapters that `config` puts in. Raises ModelError, ActorError."""
    model, lora = load_model(config.model.path), config.actor.lora
    if lora is None:
        return model
    policy = trainable_model(dict(read_config(path_or_bundled(config.model.path)).raw))
    table = _adapters(policy, lora)
    counts = {"tensor": 0, "expert": 0, "replicated": 0}
    for entry in (entry for one in table for entry in (one.a, one.b)):
        counts[entry.split] += factor_elements(entry)
    adapters = Parameters(tensor=counts["tensor"], experts=counts["expert"], whole=counts["replicated"])
    work = _work_of_adapters(policy, model.shape, table)
    experts = any(one.kind in ("experts", "shared_experts") for one in table)
    return replace(model, adapters=adapters, untrained=work, trained_experts=experts)


def untrained_work(config: Config) -> UntrainedWork:
    """What the run saves because it does not train `actor.frozen_parameters`, or adapters alone.

    Multi-token prediction counts as trained.
    """
    patterns = [re.compile(pattern) for pattern in config.actor.frozen_parameters]
    if not patterns and config.actor.lora is None:
        return UntrainedWork()
    policy = trainable_model(config.model.path)
    shape = policy.shape
    if config.actor.lora is not None:
        return _work_of_adapters(policy, shape, _adapters(policy, config.actor.lora))
    weights = [(tensor.name, tensor.shape) for tensor in export_plan(policy)]
    frozen = [one for one in weights if any(pattern.search(one[0]) for pattern in patterns)]
    saved = weight_gradient_flops(shape, frozen, tied=policy.tied_embeddings)
    trained = {name for name, _ in weights} - {name for name, _ in frozen}
    return UntrainedWork(saved, idle_layers(shape, _first_trained(trained)))


def _adapters(policy: TrainableModel, lora: LoraConfig) -> list[AdaptedWeight]:
    return adapter_table(policy, lora, padded_vocab_size=policy.vocab_size)


def _work_of_adapters(policy: TrainableModel, shape: ModelShape, table: Sequence[AdaptedWeight]) -> UntrainedWork:
    """No weight has a gradient; each element of an adapter takes part in a product forward and in two backward."""
    weights = [(tensor.name, tensor.shape) for tensor in export_plan(policy)]
    saved = weight_gradient_flops(shape, weights, tied=policy.tied_embeddings)
    names = [source.name for one in table for source in one.weight.sources]
    added = 3 * sum(weight_flops(shape, one.weight.sources[0].name, _elements_in_products(one)) for one in table)
    return UntrainedWork(saved - int(added), idle_layers(shape, _first_trained(names)))


def _elements_in_products(adapted: AdaptedWeight) -> int:
    if adapted.kind == "embedding":  # its first factor is looked up
        return prod(adapted.b.sources[0].shape)
    if adapted.kind == "shared_experts":  # all experts' tokens go through it, as through one of each expert
        return adapted.parameters * adapted.weight.sources[0].shape[0]
    return adapted.parameters


def _first_trained(names: Iterable[str]) -> int | None:
    """The first decoder layer with one of these tensors; 0 where the embedding is among them, None without any."""
    names = list(names)
    if any(name.endswith(_EMBEDDING) for name in names):
        return 0
    return min((int(found[1]) for name in names if (found := _LAYER.search(name))), default=None)
