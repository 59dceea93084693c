"""What other trainers count as FLOPs, over what they are: a row of the README's table of the field.

    python benchmarks/field_flops.py [--lengths 8192,32768]

Each function is one trainer's formula at the commit that the README names: training FLOPs per token of a sequence of
Qwen3.5-35B-A3B. Nothing of the trainers runs. `rlpipe.flops` counts what is divided by, in its default convention.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlpipe.flops import model_flops
from rlpipe.model.model_reader import describe_model

MODEL = "Qwen3.5-35B-A3B"
LENGTHS = (8192, 32768)
Sizes = Mapping[str, int]


def read_sizes() -> Sizes:
    """The text part of the model's config.json."""
    path = Path(__file__).parents[1] / "configs" / "models" / MODEL / "config.json"
    sizes: Sizes = json.loads(path.read_text())["text_config"]
    return sizes


def true_flops(length: int) -> float:
    """Per token, as `rlpipe flops` counts."""
    return model_flops(describe_model(MODEL).shape, [length]).train / length


def slime(sizes: Sizes, length: int) -> float:
    """Softmax attention in all layers, without output gate and router; an output projection of hidden x hidden."""
    hidden, heads, head_dim = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
    projections = 2 * hidden * heads * head_dim + 4 * hidden * sizes["num_key_value_heads"] * head_dim
    experts = sizes["num_experts_per_tok"] * sizes["moe_intermediate_size"] + sizes["shared_expert_intermediate_size"]
    layer = projections + 2 * hidden * hidden + 6 * hidden * experts + 2 * heads * head_dim * length
    return 3 * (sizes["num_hidden_layers"] * layer + 2 * hidden * sizes["vocab_size"])


def verl(sizes: Sizes, length: int) -> float:
    """What is true, and the lookup of embeddings as a second head."""
    return true_flops(length) + 6 * sizes["hidden_size"] * sizes["vocab_size"]


def prime_rl(sizes: Sizes, length: int) -> float:
    """Softmax attention in all layers, without causal half, over heads of hidden/heads; no gate, no shared expert."""
    hidden, heads, head_dim = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
    attention = 2 * hidden * heads * head_dim + 2 * hidden * sizes["num_key_value_heads"] * head_dim
    experts = 3 * hidden * sizes["moe_intermediate_size"] * sizes["num_experts_per_tok"]
    layer = attention + experts + hidden * sizes["num_experts"]
    parameters = sizes["num_hidden_layers"] * layer + hidden * sizes["vocab_size"]
    return 6 * parameters + 12 * sizes["num_hidden_layers"] * heads * (hidden // heads) * length


FORMULAS: Mapping[str, Callable[[Sizes, int], float]] = {"slime": slime, "verl": verl, "prime-rl": prime_rl}


def ratios(lengths: Sequence[int] = LENGTHS) -> dict[str, list[float]]:
    """By trainer: reported over true FLOPs at each length."""
    sizes = read_sizes()
    return {name: [formula(sizes, one) / true_flops(one) for one in lengths] for name, formula in FORMULAS.items()}


def cell(values: Sequence[float]) -> str:
    """As the README shows it."""
    return " and ".join(f"{value:.2f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens, separated by commas")
    lengths = [int(one) for one in parser.parse_args().lengths.split(",")]
    print(f"{MODEL}, sequences of {lengths} tokens: reported over true FLOPs")
    for name, values in ratios(lengths).items():
        print(f"{name:10} {cell(values):16} exactly {', '.join(f'{value:.3f}' for value in values)}")


if __name__ == "__main__":
    main()
