"""Whether a model's layers can be quantised by blocks, said before anything starts. Pure."""

from rlpipe.model.description import ModelDescription
from rlpipe.shared.errors import ModelError

_BLOCK = 128


def check_fp8(model: ModelDescription, tensor: int) -> None:
    """Raise ModelError unless what each of `tensor` ranks of an engine holds of a fused layer consists of whole
    blocks."""
    queries = model.heads * model.head_dim * (2 if model.attention_output_gate else 1)
    sizes = {
        "hidden_size": model.hidden_size * tensor,  # on every rank whole
        "query heads x head_dim": queries,
        "key and value heads x head_dim": max(model.kv_heads, tensor) * model.head_dim,
    }
    if not all(model.expert_layers):
        sizes["intermediate_size"] = model.mlp_width
    if model.experts is not None:
        sizes["moe_intermediate_size"] = model.experts.width
        sizes["shared_expert_intermediate_size"] = model.experts.shared_width
    for name, size in sizes.items():
        if size % (_BLOCK * tensor):
            raise ModelError(
                f"rollout.engine.quantization is 'fp8' by blocks of {_BLOCK}, but {name} of {model.architecture} gives "
                f"{size / tensor:g} on a rank (rollout.engine.tensor_parallel = {tensor}): set it to 'none'"
            )
