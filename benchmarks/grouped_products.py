"""Grouped matrix products of an experts layer, beside plain products of the same sizes: TFLOP/s of each.

    python benchmarks/grouped_products.py [--tokens 32768] [--rounds 10]

Qwen3.5-35B-A3B's shape: 256 experts, 8 a token, 2,048 channels, experts 512 wide. `routed`: experts get as many rows as
random routing gives them; `even`: all the same number; `batched`: these as one batched product; `dense`: all rows times
one expert's weight. What lies between `routed` and `dense` is what a better kernel could win.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from device_timing import seconds_per_call

EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 256, 8, 2048, 512


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    rows = options.tokens * PER_TOKEN
    print(f"{torch.cuda.get_device_name()}: {rows:,} rows, {EXPERTS} experts, bfloat16, TFLOP/s")
    print(f"{'product':>34}{'routed':>10}{'even':>10}{'batched':>10}{'dense':>10}")
    for name, deep, wide in (("gate and up", HIDDEN, 2 * WIDTH), ("down", WIDTH, HIDDEN)):
        weight = _random(EXPERTS, wide, deep)
        _line(f"{name}", rows, deep, wide, _forward(weight), options.rounds)
        _line(f"{name}, gradient of rows", rows, wide, deep, _forward(weight.transpose(1, 2)), options.rounds)
        _weight_line(f"{name}, gradient of weights", rows, deep, wide, options.rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="a multiple of the number of experts")
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _offsets(rows: int, routed: bool) -> torch.Tensor:
    """int32 [experts], where each one's rows end."""
    if not routed:
        return torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (rows // EXPERTS)
    chosen = torch.rand(rows // PER_TOKEN, EXPERTS, device="cuda").argsort(-1)[:, :PER_TOKEN]
    return torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)


def _forward(weight: torch.Tensor) -> tuple[Callable[..., torch.Tensor], ...]:
    """weight: [experts, out, in]. Products of rows by offsets, of equal batches, and of all rows with one expert."""
    turned = weight.transpose(1, 2)
    return (
        lambda x, offsets: F.grouped_mm(x, turned, offs=offsets),
        lambda x: torch.bmm(x.view(EXPERTS, -1, x.shape[1]), turned),
        lambda x: x @ turned[0],
    )


def _line(
    name: str, rows: int, deep: int, wide: int, products: tuple[Callable[..., torch.Tensor], ...], rounds: int
) -> None:
    grouped, batched, dense = products
    x = _random(rows, deep)
    offsets = [_offsets(rows, routed) for routed in (True, False)]
    calls: list[Callable[[], torch.Tensor]] = [partial(grouped, x, one) for one in offsets]
    calls += [partial(batched, x), partial(dense, x)]
    _print(name, calls, 2 * rows * deep * wide, rounds)


def _weight_line(name: str, rows: int, deep: int, wide: int, rounds: int) -> None:
    x, gradient = _random(rows, deep), _random(rows, wide)
    offsets = [_offsets(rows, routed) for routed in (True, False)]
    batches = gradient.view(EXPERTS, -1, wide).transpose(1, 2), x.view(EXPERTS, -1, deep)
    calls: list[Callable[[], torch.Tensor]] = [partial(F.grouped_mm, gradient.t(), x, offs=one) for one in offsets]
    calls += [partial(torch.bmm, *batches), partial(torch.mm, gradient.t(), x)]
    _print(name, calls, 2 * rows * deep * wide, rounds)


def _print(name: str, calls: list[Callable[[], torch.Tensor]], flops: int, rounds: int) -> None:
    speeds = "".join(f"{flops / seconds_per_call(call, rounds) / 1e12:10.1f}" for call in calls)
    print(f"{name:>34}{speeds}", flush=True)


if __name__ == "__main__":
    main()
