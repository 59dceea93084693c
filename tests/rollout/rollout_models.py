"""Small models with random weights, in Hugging Face layout, and what transformers computes with them."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 320
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": None,
    "initializer_range": 0.1,
}


def save_dense(folder: Path, seed: int, tokenizer: bool = True) -> str:
    """A Qwen3 of two layers."""
    torch.manual_seed(seed)
    config = Qwen3Config(**_COMMON, eos_token_id=256, pad_token_id=257, intermediate_size=128, num_hidden_layers=2)
    return _save(Qwen3ForCausalLM(config), folder, tokenizer)


def save_hybrid(folder: Path, seed: int) -> str:
    """A Qwen3.5-MoE: three gated-delta-net layers and one of softmax attention, experts and a shared expert."""
    torch.manual_seed(seed)
    config = Qwen3_5MoeTextConfig(
        **_COMMON,
        eos_token_id=256,
        pad_token_id=257,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    _save(Qwen3_5MoeForCausalLM(config), folder, tokenizer=True)
    _add_to_config(folder, full_attention_interval=4)  # SGLang reads it; transformers does not write it
    return str(folder)


def reference_logprobs(folder: str, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0):
    """Natural log of softmax(logits / temperature) of each response token, by transformers."""
    model = _loaded(folder)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def chosen_experts(folder: str, token_ids: tuple[int, ...]) -> np.ndarray:
    """The experts of each token and layer in rising order, by transformers: [tokens, layers, experts per token]."""
    model = _loaded(folder)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, answer: chosen.append(answer[2].sort(-1).values))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).numpy()


@cache
def _loaded(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def state(folder: str) -> dict[str, torch.Tensor]:
    """The saved tensors by their names in the file."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def stacked_state(folder: str) -> dict[str, torch.Tensor]:
    """The same with the experts of each layer in two tensors, as weights are sent."""
    tensors, stacked = state(folder), {}
    for name in tensors:
        root, found, rest = name.partition(".experts.")
        if not found:
            stacked[name] = tensors[name]
        elif rest == "0.gate_proj.weight":
            count = sum(one.startswith(f"{root}.experts.") for one in tensors) // 3
            gate, up, down = (
                torch.stack([tensors[f"{root}.experts.{index}.{kind}_proj.weight"] for index in range(count)])
                for kind in ("gate", "up", "down")
            )
            stacked[f"{root}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
            stacked[f"{root}.experts.down_proj"] = down
    return stacked


def _add_to_config(folder: Path, **entries) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def _save(model, folder: Path, tokenizer: bool) -> str:
    model.float().save_pretrained(folder)
    if tokenizer:
        alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        raw = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>").save_pretrained(
            folder
        )
    return str(folder)
