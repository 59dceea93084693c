"""Whether a model's layers can be quantised by blocks, said before anything starts. Pure."""

from rlpipe.model.description import ModelDescription
from rlpipe.shared.errors import ModelError

_BLOCK = 128


def check_fp8(model: ModelDescription, quantization: str, tensor: int, expert: int = 1) -> None:
    """Raise ModelError unless what each of `tensor` ranks of an engine holds of a fused layer consists of whole
    blocks.

    quantization: `rollout.engine.quantization`. expert: of the ranks, so many share the experts between them.
    """
    if quantization == "fp8" and model.experts is None:
        raise ModelError(
            f"rollout.engine.quantization is 'fp8', but {model.architecture} has no experts, by which 8 bits save "
            "time: set it to 'fp8_all' to save memory, or to 'none'"
        )
    sizes = {"hidden_size": model.hidden_size * tensor}  # on every rank whole
    if model.experts is not None:
        sizes["moe_intermediate_size"] = model.experts.width * expert  # of whole experts, or of less divided ones
    if quantization == "fp8_all":
        sizes |= _projection_sizes(model, tensor)
    for name, size in sizes.items():
        if size % (_BLOCK * tensor):
            raise ModelError(
                f"rollout.engine.quantization is {quantization!r} by blocks of {_BLOCK}, but {name} of "
                f"{model.architecture} gives {size / tensor:g} on a rank (rollout.engine.tensor_parallel = {tensor}): "
                "set it to 'none'"
            )


def _projection_sizes(model: ModelDescription, tensor: int) -> dict[str, int]:
    """Of what is quantised beside experts."""
    sizes = {
        "query heads x head_dim": model.heads * model.head_dim * (2 if model.attention_output_gate else 1),
        "key and value heads x head_dim": max(model.kv_heads, tensor) * model.head_dim,
    }
    if not all(model.expert_layers):
        sizes["intermediate_size"] = model.mlp_width
    if model.experts is not None:
        sizes["shared_expert_intermediate_size"] = model.experts.shared_width
    return sizes
