"""`rlpipe flops MODEL --seqlens 1024,512`: the breakdown of one batch, as text or JSON."""

import json
from collections.abc import Sequence

from rlpipe.flops.breakdown import FlopsBreakdown, model_flops
from rlpipe.flops.convention import Convention
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ConfigError


def parse_seqlens(text: str) -> tuple[int, ...]:
    """Lengths in tokens from "1024,512"; ConfigError unless they are positive integers."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"--seqlens is {text!r}, expected lengths in tokens such as 1024,512")
    return lengths


def run_flops(
    model: str, seqlens: Sequence[int], convention: str = Convention.CAUSAL_HALF.value, as_json: bool = False
) -> str:
    """What the command prints. `model`: a config.json, its folder, or a name in configs/models.

    JSON: `convention`, `tokens`, `forward`, `train`, `logprob`, and forward FLOPs by part in `per_layer_type`.
    ConfigError for an unknown convention, ModelError for a model that cannot be counted.
    """
    if convention not in set(Convention):
        raise ConfigError(f"--convention is {convention!r}, expected one of {', '.join(Convention)}")
    if not seqlens:
        raise ConfigError("no sequence lengths: give at least one with --seqlens")
    breakdown = model_flops(describe_model(model).shape, seqlens, Convention(convention))
    return _as_json(breakdown) if as_json else _as_text(breakdown)


def _as_json(breakdown: FlopsBreakdown) -> str:
    values = {
        "convention": breakdown.convention.value,
        "tokens": breakdown.tokens,
        "forward": breakdown.forward,
        "train": breakdown.train,
        "logprob": breakdown.logprob,
        "per_layer_type": breakdown.per_layer_type,
    }
    return json.dumps(values, indent=2)


def _as_text(breakdown: FlopsBreakdown) -> str:
    rows = [(name, flops, f"{flops / breakdown.forward:7.1%}") for name, flops in breakdown.per_layer_type.items()]
    totals = (("forward", breakdown.forward), ("log-prob pass", breakdown.logprob), ("training", breakdown.train))
    rows += [(name, flops, "") for name, flops in totals]
    lines = [f"{name:<18} {flops:>26,} {share}".rstrip() for name, flops, share in rows]
    per_token = breakdown.train / breakdown.tokens / 1e9
    return "\n".join(
        [
            f"FLOPs of {breakdown.tokens:,} tokens, convention {breakdown.convention.value}",
            *lines,
            f"training, per token {per_token:,.3f} GFLOPs",
        ]
    )
