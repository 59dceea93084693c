"""Models for the planner's tests: large enough that what they hold outweighs what libraries do."""

from pathlib import Path
from typing import Any

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import validate
from rlpipe.config.root import Config
from rlpipe.estimate.memory import plan_memory
from rlpipe.training.trained_share import planned_model

LENGTHS = (512, 300, 700, 536)
_COMMON = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 16384}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": 256}
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "intermediate_size": None,
}


def write_model(folder: Path, kind: str, sizes: dict[str, Any]) -> Path:
    """A random model ("dense" or "hybrid") in Hugging Face layout; `sizes` go before those of its kind."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, changes = {"dense": ("qwen3", {}), "hybrid": ("qwen3_5_moe_text", HYBRID)}[kind]
    merged = {key: value for key, value in (_COMMON | changes | sizes).items() if changes.get(key, value) is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**merged))
    path = folder / f"{kind}-{sizes['hidden_size']}"
    model.save_pretrained(path)
    return path


def planned_config(path: Path, actor: dict[str, Any], **sections: Any) -> Config:
    return validate(
        {
            "run": {"name": "r", "iterations": 1},
            "model": {"path": str(path)},
            "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
            "actor": actor,
            "rollout": {"max_response_tokens": 512},
            **sections,
        },
        "test",
    )


def planned_parts(path: Path, actor: dict[str, Any], cluster: ClusterConfig) -> dict[str, int]:
    """Bytes of an actor's process by part, as the planner has them."""
    config = planned_config(path, actor)
    parts = dict(plan_memory(config, planned_model(config), cluster).actor)
    parts.pop("weight sync")
    return parts
