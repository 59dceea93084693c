"""What a model cannot do in a configured actor or engine, said before anything starts. Pure: no weights, no torch."""

from collections.abc import Iterable

from rlpipe.config.actor import ActorConfig, ParallelConfig
from rlpipe.model.description import ModelDescription, TrainableModel
from rlpipe.shared.errors import ModelError


def check_actor(model: ModelDescription, actor: ActorConfig) -> None:
    """Raise ModelError where `actor` asks for what `model` cannot do: a layout that does not divide it, layers for
    multi-token prediction that it does not have, recomputation of what it does not contain."""
    check_layout(model, actor.parallel)
    if actor.train_mtp and model.mtp_layers != 1:
        raise ModelError(
            f"actor.train_mtp is on, but {model.architecture} has {model.mtp_layers} multi-token-prediction layers "
            "(exactly 1 can be trained): set actor.train_mtp to false"
        )
    _check_recomputation(model, actor)


def check_layout(model: ModelDescription, parallel: ParallelConfig) -> None:
    """Raise ModelError unless every size divides over the ranks that share it."""
    tensor, context = parallel.tensor, parallel.context
    divisions = [
        ("num_attention_heads", model.heads, "actor.parallel.tensor", tensor),
        (
            "num_hidden_layers",
            model.layers,
            "actor.parallel.pipeline x virtual_pipeline",
            parallel.pipeline * (parallel.virtual_pipeline or 1),
        ),
    ]
    if not all(model.expert_layers):
        divisions.append(("intermediate_size", model.mlp_width, "actor.parallel.tensor", tensor))
    if model.experts is not None:
        shared = model.experts.shared_width
        divisions.append(("num_experts", model.experts.experts, "actor.parallel.expert", parallel.expert))
        divisions.append(("shared_expert_intermediate_size", shared, "actor.parallel.tensor", tensor))
    if model.gated_delta_net is not None:
        heads, product = model.gated_delta_net.key_heads, "actor.parallel.tensor x context"
        divisions.append(("linear_num_key_heads", heads, product, tensor * context))
    _refuse_remainders(model, divisions)
    _refuse_uneven_kv_heads(model, "actor.parallel.tensor", tensor)
    if model.experts is None and parallel.expert > 1:
        raise ModelError(f"actor.parallel.expert = {parallel.expert}, but {model.architecture} has no experts: use 1")
    if model.experts is not None and tensor > 1 and not parallel.sequence:
        raise ModelError("experts with actor.parallel.tensor above 1 need actor.parallel.sequence = true")


def check_engine_layout(model: ModelDescription, tensor: int) -> None:
    """Raise ModelError unless every size divides over the `tensor` ranks of an engine, as SGLang's layers assert."""
    where = "rollout.engine.tensor_parallel"
    sizes = {"num_attention_heads": model.heads}
    if not all(model.expert_layers):
        sizes["intermediate_size"] = model.mlp_width
    if model.experts is not None:
        sizes["moe_intermediate_size"] = model.experts.width
        sizes["shared_expert_intermediate_size"] = model.experts.shared_width
    if model.gated_delta_net is not None:
        sizes["linear_num_key_heads"] = model.gated_delta_net.key_heads
    _refuse_remainders(model, [(name, size, where, tensor) for name, size in sizes.items()])
    _refuse_uneven_kv_heads(model, where, tensor)


def _refuse_remainders(model: ModelDescription, divisions: Iterable[tuple[str, int, str, int]]) -> None:
    """`divisions`: the name of a size, the size, what divides it, and by how much."""
    for name, size, where, parts in divisions:
        if size % parts:
            raise ModelError(f"{name} = {size} of {model.architecture} does not divide by {where} = {parts}")


def _refuse_uneven_kv_heads(model: ModelDescription, where: str, ranks: int) -> None:
    if max(ranks, model.kv_heads) % min(ranks, model.kv_heads):
        raise ModelError(
            f"num_key_value_heads = {model.kv_heads} of {model.architecture} and {where} = {ranks}: one must be a "
            "multiple of the other"
        )


def _check_recomputation(model: ModelDescription, actor: ActorConfig) -> None:
    if actor.recompute.granularity != "selective":
        return
    there = {
        "core_attn": "full_attention" in model.layer_kinds,
        "mlp": not all(model.expert_layers),
        "moe": model.experts is not None,
        "shared_experts": model.experts is not None and model.experts.shared_width > 0,
    }
    for module in actor.recompute.modules:
        if not there[module]:
            raise ModelError(
                f"actor.recompute.modules has {module!r}, which {model.architecture} does not contain: "
                f"it has {', '.join(name for name, contained in there.items() if contained)}"
            )


def check_reference(policy: TrainableModel, reference: TrainableModel) -> None:
    """Raise ModelError unless both compute the same function of their weights: the reference's go through the policy's
    modules."""
    own, other = policy.maths, reference.maths
    for name in own:
        if own[name] != other[name]:
            raise ModelError(
                f"model.reference_path holds a model with {name} = {other[name]}, model.path one with {own[name]}: "
                "give a reference of the same shape"
            )
