"""What will stream out, without any weights: imports neither torch nor Megatron."""

from actor.hf.table import weight_table
from actor.models.description import ModelDescription
from rlpipe.weights import TensorSpec


def export_plan(model: ModelDescription, dtype: str = "bfloat16", *, with_mtp: bool = False) -> tuple[TensorSpec, ...]:
    """Names, dtype and shapes of what `iter_export` yields, in its order. with_mtp: as given there."""
    table = weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=with_mtp)
    sources = (source for entry in table if entry.copy_of is None for source in entry.sources)
    return tuple(TensorSpec(source.name, dtype, source.shape) for source in sources)
