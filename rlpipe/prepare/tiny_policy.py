"""A tiny policy with random weights in Hugging Face layout."""

import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rlpipe.config.model import TinyPolicyConfig
from rlpipe.estimate.present_cluster import host_memory_bytes
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.disk_errors import written_whole
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "transformers.configuration_utils:PreTrainedConfig._attn_implementation",
    why="parity runs take plain attention whatever is installed",
    drop_when="a configuration takes it under a public name",
)

_VOCABULARY_MULTIPLE = 64
_BYTES_A_PARAMETER = 8
"""Itself, and its place in the file that is written."""


def make_tiny_policy(shape: TinyPolicyConfig, folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer into `folder`: the same bytes for the same seed.

    Raises:
        ConfigError: this machine's memory does not hold it. ResourceError: the disk does not.
    """
    tokenizer = byte_tokenizer()
    build = {"qwen3": _qwen3, "qwen3_5_moe": _qwen3_5_moe}[shape.architecture]
    with torch.device("meta"):
        _check_size(build(shape, _common(shape, tokenizer)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(shape, _common(shape, tokenizer))
        _fill_padding_row(model)
        drafting = _prediction_layer(model) if shape.prediction_layer else None
    partial = folder.with_name(folder.name + ".partial")
    disable_progress_bar()  # a library-wide switch; a bar for one small file is noise
    with written_whole(partial):
        model.save_pretrained(partial)
        if drafting is not None:
            _add_prediction_layer(partial, drafting)
        tokenizer.save_pretrained(partial)
        _add_full_attention_interval(partial / "config.json")
        partial.rename(folder)


def _check_size(model: PreTrainedModel) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    there = host_memory_bytes()
    if _BYTES_A_PARAMETER * parameters > there:
        raise ConfigError(
            f"prepare.policy describes a policy of {parameters / 1e9:,.1f} billion parameters in float32, more than "
            f"can be made in the {there / 1e9:.0f} GB of this machine: lower its sizes, or set model.path to a model"
        )


def _fill_padding_row(model: PreTrainedModel) -> None:
    """Transformers leaves zeros there; a policy may sample the token, and the gradient of a norm explodes at zero."""
    embedding: Any = model.get_input_embeddings()
    embedding.weight.data[model.config.pad_token_id].normal_(std=model.config.initializer_range)


def _common(shape: TinyPolicyConfig, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": math.ceil(len(tokenizer) / _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }


def _qwen3(shape: TinyPolicyConfig, common: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(_checked(Qwen3Config(**common)))


def _qwen3_5_moe(shape: TinyPolicyConfig, common: dict[str, Any]) -> PreTrainedModel:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    pattern = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3_5MoeTextConfig(
        **common,
        layer_types=[pattern[index % 4] for index in range(shape.layers)],
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.expert_intermediate_size,
        shared_expert_intermediate_size=shape.expert_intermediate_size,
        linear_num_key_heads=shape.key_value_heads,
        linear_num_value_heads=2 * shape.key_value_heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        linear_conv_kernel_dim=4,
    )
    return Qwen3_5MoeForCausalLM(_checked(config))


def _prediction_layer(model: PreTrainedModel) -> PreTrainedModel:
    """A model of one layer of softmax attention, which is what a multi-token-prediction layer is but for its input."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    return type(model)(config)


def _add_prediction_layer(folder: Path, layer: PreTrainedModel) -> None:
    """Its tensors beside the policy's, under the names of Qwen3.5's checkpoints, and its number in config.json."""
    with tempfile.TemporaryDirectory() as own:
        layer.save_pretrained(own)
        made = load_file(Path(own) / "model.safetensors")
    parts = ("model.layers.0.", "model.norm.")
    added = {name.replace("model.", "mtp.", 1): tensor for name, tensor in made.items() if name.startswith(parts)}
    hidden, spread = layer.config.hidden_size, layer.config.initializer_range
    for name in ("embedding", "hidden"):
        added[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros(hidden)
    generator = torch.Generator().manual_seed(hidden)
    added["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * spread
    file = folder / "model.safetensors"
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}, indent=2) + "\n")


def _checked(config: PretrainedConfig) -> PretrainedConfig:
    config._attn_implementation = "eager"
    return config


def _add_full_attention_interval(path: Path) -> None:
    """SGLang's hybrid models read `full_attention_interval`, which transformers does not write."""
    config = json.loads(path.read_text())
    if "linear_attention" in config.get("layer_types", []):
        config["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
        path.write_text(json.dumps(config, indent=2) + "\n")
