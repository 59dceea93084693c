"""Reading one section of a Hugging Face config with nothing silent: types checked, left-over keys judged by name."""

import re
from collections.abc import Mapping
from typing import Any

from rlpipe.shared.errors import ModelError

_LARGEST_SIZE = 2**31 - 1

_LOOKS_ARCHITECTURAL = re.compile(
    r"layer|head|dim|size|rank|expert|window|attn|attention|mtp|nextn|moe|mixer|hidden|conv|ssm|mamba|linear|block|"
    r"depth|kv|latent|lora|ffn|mlp|gate|shared|sparse|dense|top_k|chunk|interval|index|stride|pattern|compress|freq|"
    r"width|channel|patch|recurr|loop|memory|mla|swa|dsa|hybrid|first_k|_config$|num_|^n_"
)

_HARMLESS = re.compile(
    r"(^|_)token_id$|_token_index$|_eps$|_epsilon$|dropout|^rope_|_rope_theta$|initializer|_std$|aux_loss|dtype|"
    r"_coef$|_act$|_activation$|_bias$|^output_|^_|^use_cache$|^quantization_config$|^compression_config$|^unsloth"
)

_HARMLESS_NAMES = frozenset(
    {
        "architectures",
        "attn_implementation",
        "chunk_size_feed_forward",
        "ep_size",
        "id2label",
        "label2id",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "mtp_use_dedicated_embeddings",
        "n_group",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_logits_to_keep",
        "num_position_embeddings",
        "num_return_sequences",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "pretraining_tp",
        "qk_norm",
        "rotary_dim",
        "router_jitter_noise",
        "tie_word_embeddings",
        "top_k",
        "topk_group",
        "use_qk_norm",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)


class Section:
    """One section of a config. It remembers which keys were read: `refuse_unread` judges the others."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self._values = values
        self._place = place
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._values.get(key) is not None

    def lacks(self, key: str) -> bool:
        """Whether the key is absent; a null is not absent."""
        return key not in self._values

    def ignore(self, *keys: str) -> None:
        """Keys that the model type defines but that do not enter its maths in this configuration."""
        self._read.update(keys)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """The value of `key`; ModelError if it is missing without a default, no integer, or below `minimum`."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._place} lacks {key!r}, without which the model is not known: add it to the file")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _LARGEST_SIZE:
            raise ModelError(
                f"{self._place}: {key!r} is {value!r}, expected an integer from {minimum} to {_LARGEST_SIZE}"
            )
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._place}: {key!r} is {value!r}, expected true or false")
        return value

    def items(self, key: str) -> list[Any]:
        """The list at `key`; an absent or null one is empty."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise ModelError(f"{self._place}: {key!r} is {value!r}, expected a list")
        return list(value)

    def error(self, key: str, reason: str) -> ModelError:
        return ModelError(f"{self._place}: {key!r} is {self._values.get(key)!r}: {reason}")

    def refuse_unread(self, model_type: str) -> None:
        """Refuse, by name, each unread key that looks like a part of the architecture and is switched on.

        Zero, false, null and empty values switch a feature off. Names that only hold numerics, tokens or training
        settings pass. The price of the caution is that an unknown harmless key may have to be removed by hand.
        """
        unknown = sorted(
            key
            for key, value in self._values.items()
            if key not in self._read and value and not self._is_harmless(key) and _LOOKS_ARCHITECTURAL.search(key)
        )
        if unknown:
            named = ", ".join(f"{key} = {self._values[key]!r}" for key in unknown)
            raise ModelError(
                f"{self._place} has fields that rlpipe does not know for model type {model_type!r} and that may change "
                f"its layers: {named}; remove them if they do not belong to this model, or add them to "
                "rlpipe/model/families.py"
            )

    @staticmethod
    def _is_harmless(key: str) -> bool:
        return key in _HARMLESS_NAMES or _HARMLESS.search(key) is not None
