"""Model types of Hugging Face configs that can be counted, and how each lays out its decoder.

Sizes must be in the file. Patterns that a file may leave out (which layers are sparse, windowed or linear, the width
of a head) have the defaults of transformers' model code for that type, because that is the model which would be built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rlpipe.model import hf_feed_forwards as feed_forwards
from rlpipe.model import hf_mixers as mixers
from rlpipe.model.hf_feed_forwards import FeedForwards
from rlpipe.model.hf_mixers import Mixers
from rlpipe.model.hf_section import Section


@dataclass(frozen=True)
class Family:
    """How a model type's config section becomes its layers. `deepstack`: its vision tower may have inner mergers."""

    mixers: Callable[[Section], Mixers]
    feed_forwards: Callable[[Section], FeedForwards]
    deepstack: bool = False


def _from_layer(layer: int, max_window_layers: int) -> bool:
    return layer >= max_window_layers


def _every_other_before(layer: int, max_window_layers: int) -> bool:
    return layer % 2 == 0 and layer < max_window_layers


_shared_experts_by_step = partial(feed_forwards.experts_by_step, shared=True)
_plain_experts_by_step = partial(feed_forwards.experts_by_step, shared=False)

_hybrid_dense = Family(mixers.hybrid_delta_net, feed_forwards.dense)
_hybrid_experts = Family(mixers.hybrid_delta_net, feed_forwards.experts)
_vision_dense = Family(partial(mixers.full_attention, head_dim=128), feed_forwards.dense, deepstack=True)
_vision_experts = Family(mixers.full_attention, _plain_experts_by_step, deepstack=True)
_deepseek = Family(mixers.latent_attention, feed_forwards.experts_after_dense_layers)

FAMILIES: dict[str, Family] = {
    "llama": Family(mixers.full_attention, feed_forwards.dense),
    "mistral": Family(partial(mixers.one_window, default_window=4096), feed_forwards.dense),
    "mixtral": Family(partial(mixers.one_window, default_window=None), feed_forwards.mixtral_experts),
    "qwen2": Family(partial(mixers.chosen_windows, default_windowed=_from_layer), feed_forwards.dense),
    "qwen2_moe": Family(partial(mixers.chosen_windows, default_windowed=_every_other_before), _shared_experts_by_step),
    "qwen3": Family(partial(mixers.chosen_windows, head_dim=128, default_windowed=_from_layer), feed_forwards.dense),
    "qwen3_moe": Family(mixers.switched_window, _plain_experts_by_step),
    "qwen3_next": Family(mixers.hybrid_delta_net, _shared_experts_by_step),
    "qwen3_5": _hybrid_dense,
    "qwen3_5_text": _hybrid_dense,
    "qwen3_5_moe": _hybrid_experts,
    "qwen3_5_moe_text": _hybrid_experts,
    "qwen3_vl": _vision_dense,
    "qwen3_vl_text": _vision_dense,
    "qwen3_vl_moe": _vision_experts,
    "qwen3_vl_moe_text": _vision_experts,
    "glm4_moe": Family(mixers.full_attention, feed_forwards.experts_after_dense_layers),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
