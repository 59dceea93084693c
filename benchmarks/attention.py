"""Attention of a pack by cuDNN, one sequence after the other, and by FlashAttention 2, all of them in one call.

Packs of about 32,768 tokens, of sequences as long as each other; heads of Qwen3.5-35B-A3B, bfloat16, on a GPU of kind
Hopper or newer. `first ms` is the first pass over a length, in which cuDNN makes its plans.

    python benchmarks/attention.py [--lengths 2048,8192] [--tokens 32768]
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from actor.layers.causal_attention import Segments, long_sequence, packed_flash

HEADS, KEY_VALUE_HEADS, CHANNELS = 16, 2, 256
SCALE = CHANNELS**-0.5
ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,1024,2048,3000,4096,8192,9000,16384,20000,32768")
    parser.add_argument("--tokens", type=int, default=32768, help="of a pack")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    if not torch.cuda.is_available():
        sys.exit("attention: there is no GPU here, and its kernels have no other device")
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads of {CHANNELS}, {KEY_VALUE_HEADS} key/value heads, bfloat16")
    print(f"{'sequences':>17}{'':8}{'first ms':>10}{'forward ms':>12}{'backward ms':>13}{'cuDNN over flash':>18}")
    for length in lengths:
        count = max(1, arguments.tokens // length)
        cudnn, flash = (measure(length, count, name) for name in ("cuDNN", "flash"))
        for name, (first, forward, backward) in (("cuDNN", cudnn), ("flash", flash)):
            ratio = f"{sum(flash[1:]) / sum(cudnn[1:]):17.2f}x" if name == "cuDNN" else ""
            pack = f"{count} x {length:,}"
            print(f"{pack:>17}{name:>8}{first:10.1f}{forward:12.3f}{backward:13.3f}{ratio}", flush=True)


def measure(length: int, count: int, name: str) -> tuple[float, float, float]:
    """Milliseconds: of the first pass forward and backward, and medians of later ones."""
    shapes = (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(count * length, heads, CHANNELS, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in shapes
    )
    for leaf in (q, k, v):
        leaf.requires_grad_()
    times = []
    for _ in range(ROUNDS + 1):
        marks = [_now()]
        out = attend(q, k, v, length, name)
        marks.append(_now())
        out.backward(torch.ones_like(out))
        marks.append(_now())
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
    forward, backward = (median(column) for column in zip(*times[1:], strict=True))
    return sum(times[0]) * 1e3, forward * 1e3, backward * 1e3


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, name: str) -> torch.Tensor:
    """Of a pack of sequences of `length` tokens."""
    if name == "cuDNN":
        sequences = zip(q.split(length), k.split(length), v.split(length), strict=True)
        return torch.cat([long_sequence(*sequence, SCALE) for sequence in sequences])
    ends = torch.arange(0, len(q) + 1, length, device=q.device, dtype=torch.int32)
    segments = Segments(tuple(ends.tolist()), ends)
    return packed_flash(q, k, v, segments, segments, SCALE)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
