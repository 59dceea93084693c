"""The feed-forward parts of a decoder, one for each layer, read from a Hugging Face config."""

from rlpipe.flops.layers import DenseFeedForward, FeedForward, MixtureOfExperts
from rlpipe.model.hf_mixers import layer_count
from rlpipe.model.hf_section import Section

FeedForwards = tuple[FeedForward, ...]


def dense(section: Section) -> FeedForwards:
    return (_dense(section),) * layer_count(section)


def experts(section: Section) -> FeedForwards:
    """Qwen3.5: experts in every layer; its model code knows no dense ones."""
    for key, value in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if section.get(key) not in (None, value):
            raise section.error(key, "this model type makes every layer a mixture of experts")
    section.ignore("intermediate_size")
    return (_qwen_experts(section, shared=True),) * layer_count(section)


def experts_by_step(section: Section, *, shared: bool) -> FeedForwards:
    """Qwen: every `decoder_sparse_step`-th layer, counted from 1, has experts, but for `mlp_only_layers`, from 0."""
    step, dense_layers = section.integer("decoder_sparse_step", 1), section.items("mlp_only_layers")
    layers = range(layer_count(section))
    outside = [layer for layer in dense_layers if layer not in layers]
    if outside:
        raise section.error("mlp_only_layers", f"{outside} are no layers of a model with {len(layers)}")
    any_experts = _expert_count(section) > 0
    section.ignore("intermediate_size", "moe_intermediate_size", "num_experts_per_tok")
    if shared:
        section.ignore("shared_expert_intermediate_size")
    return tuple(
        _qwen_experts(section, shared=shared)
        if any_experts and layer not in dense_layers and (layer + 1) % step == 0
        else _dense(section)
        for layer in layers
    )


def mixtral_experts(section: Section) -> FeedForwards:
    part = _routed(section, experts=_expert_count(section), intermediate_size=section.integer("intermediate_size"))
    return (part,) * layer_count(section)


def experts_after_dense_layers(section: Section) -> FeedForwards:
    """DeepSeek and GLM-4.5: the first layers are dense; shared experts have no gate."""
    if section.integer("moe_layer_freq", 1) != 1:
        raise section.error("moe_layer_freq", "only 1 can be counted: this model type knows no other")
    section.ignore("num_local_experts", "intermediate_size")
    first_sparse = section.integer("first_k_dense_replace", minimum=0)
    expert_size = section.integer("moe_intermediate_size")
    sparse = _routed(
        section,
        experts=section.integer("n_routed_experts"),
        intermediate_size=expert_size,
        shared_intermediate_size=section.integer("n_shared_experts", 0, minimum=0) * expert_size,
    )
    layers = range(layer_count(section))
    return tuple(sparse if layer >= first_sparse else _dense(section) for layer in layers)


def _dense(section: Section) -> DenseFeedForward:
    return DenseFeedForward(section.integer("hidden_size"), section.integer("intermediate_size"))


def _qwen_experts(section: Section, *, shared: bool) -> MixtureOfExperts:
    """The shared expert, where the type has one, is scaled by a gate of its own; a width of 0 means there is none."""
    return _routed(
        section,
        experts=_expert_count(section),
        intermediate_size=section.integer("moe_intermediate_size"),
        shared_intermediate_size=section.integer("shared_expert_intermediate_size", minimum=0) if shared else 0,
        shared_gate=True,
    )


def _routed(
    section: Section,
    *,
    experts: int,
    intermediate_size: int,
    shared_intermediate_size: int = 0,
    shared_gate: bool = False,
) -> MixtureOfExperts:
    per_token = section.integer("num_experts_per_tok")
    if per_token > experts:
        raise section.error("num_experts_per_tok", f"there are only {experts} experts")
    hidden_size = section.integer("hidden_size")
    return MixtureOfExperts(hidden_size, experts, per_token, intermediate_size, shared_intermediate_size, shared_gate)


def _expert_count(section: Section) -> int:
    """`num_experts`, which newer files call `num_local_experts`."""
    counts = {key: section.integer(key, minimum=0) for key in _EXPERT_COUNTS if section.has(key)}
    if not counts:
        return section.integer(_EXPERT_COUNTS[0])
    if len(set(counts.values())) > 1:
        raise section.error(_EXPERT_COUNTS[0], f"contradicts {_EXPERT_COUNTS[1]} = {counts[_EXPERT_COUNTS[1]]}")
    return min(counts.values())


_EXPERT_COUNTS = ("num_experts", "num_local_experts")
