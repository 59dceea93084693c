"""Attention of a pack by cuDNN, one sequence after the other, and by FlashAttention 2, all of them in one call.

Packs of about 32,768 tokens, of sequences as long as each other; then pieces of sequences, as context parallelism makes
them, each with the keys before it. Heads of Qwen3.5-35B-A3B, bfloat16, on a GPU of kind Hopper or newer. `first ms` is
the first pass over a length, in which cuDNN makes its plans.

    python benchmarks/attention.py [--lengths 2048,8192] [--pieces 8192+24576] [--tokens 32768]
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from actor.layers.causal_attention import Segments, packed_flash
from actor.layers.cudnn_attention import Part, long_parts

HEADS, KEY_VALUE_HEADS, CHANNELS = 16, 2, 256
SCALE = CHANNELS**-0.5
ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,1024,2048,3000,4096,8192,9000,16384,20000,32768")
    parser.add_argument("--pieces", default="3000+3000,4096+12288,7000+7000,8192+24576,16384+49152,65536+196608")
    parser.add_argument("--tokens", type=int, default=32768, help="of a pack")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention: there is no GPU here, and its kernels have no other device")
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads of {CHANNELS}, {KEY_VALUE_HEADS} key/value heads, bfloat16")
    print(f"{'sequences':>19}{'':8}{'first ms':>10}{'forward ms':>12}{'backward ms':>13}{'cuDNN over flash':>18}")
    for length in map(int, arguments.lengths.split(",")):
        count = max(1, arguments.tokens // length)
        _compare(f"{count} x {length:,}", count, length, length)
    for piece in arguments.pieces.split(","):
        own, before = map(int, piece.split("+"))
        _compare(f"{own:,} + {before:,}", 1, own, own + before)


def _compare(name: str, count: int, queries: int, keys: int) -> None:
    cudnn, flash = (measure(count, queries, keys, kernel) for kernel in ("cuDNN", "flash"))
    for kernel, (first, forward, backward) in (("cuDNN", cudnn), ("flash", flash)):
        ratio = f"{sum(flash[1:]) / sum(cudnn[1:]):17.2f}x" if kernel == "cuDNN" else ""
        print(f"{name:>19}{kernel:>8}{first:10.1f}{forward:12.3f}{backward:13.3f}{ratio}", flush=True)


def measure(count: int, queries: int, keys: int, name: str) -> tuple[float, float, float]:
    """Milliseconds: of the first pass forward and backward, and medians of later ones."""
    shapes = ((count * queries, HEADS), (count * keys, KEY_VALUE_HEADS), (count * keys, KEY_VALUE_HEADS))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(*shape, CHANNELS, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes
    )
    for leaf in (q, k, v):
        leaf.requires_grad_()
    times = []
    for _ in range(ROUNDS + 1):
        marks = [_now()]
        out = attend(q, k, v, queries, keys, name)
        marks.append(_now())
        out.backward(torch.ones_like(out))
        marks.append(_now())
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
    forward, backward = (median(column) for column in zip(*times[1:], strict=True))
    return sum(times[0]) * 1e3, forward * 1e3, backward * 1e3


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: int, keys: int, name: str) -> torch.Tensor:
    """Of a pack of sequences, or pieces of them, of `queries` tokens, each of which sees `keys`."""
    if name == "cuDNN":
        count = len(q) // queries
        rows = ([slice(one * size, (one + 1) * size) for one in range(count)] for size in (queries, keys))
        return long_parts(q, k, v, [Part(*both) for both in zip(*rows, strict=True)], [], SCALE)
    ends = [torch.arange(0, len(one) + 1, size, device=q.device) for one, size in ((q, queries), (k, keys))]
    seen_by, seen = (Segments(tuple(one.tolist()), one.int()) for one in ends)
    return packed_flash(q, k, v, seen_by, seen, SCALE)


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
