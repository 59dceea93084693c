"""The smallest configuration of a run that can be read, for tests that change parts of it, and a small model's."""

from typing import Any

from rlpipe.config.load import validate
from rlpipe.config.root import Config

_TREE = {
    "run": {"name": "r", "iterations": 1},
    "model": {"path": "none"},
    "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
}


SMALL_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
"""Of a config.json."""


def small_config(**sections: Any) -> Config:
    """With `sections` in it, each in the place of the whole one."""
    return validate(_TREE | sections, "test")
