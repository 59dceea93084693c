"""Attention of one sequence by cuDNN and by FlashAttention 2, forward and backward, over lengths.

Heads of Qwen3.5-35B-A3B, bfloat16, on a GPU of kind Hopper or newer. `first ms` is the first call of a length, in which
cuDNN makes its plans.

    python benchmarks/attention.py [--lengths 2048,8192]
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
ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,2048,3000,4096,8192,9000,16384,20000,32768")
    lengths = [int(length) for length in parser.parse_args().lengths.split(",")]
    if not torch.cuda.is_available():
        sys.exit("attention: there is no GPU here, and its kernels have no other device")
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads of {CHANNELS}, {KEY_VALUE_HEADS} key/value heads, bfloat16")
    print(f"{'tokens':>8}{'':8}{'first ms':>10}{'forward ms':>12}{'backward ms':>13}{'cuDNN over flash':>18}")
    for length in lengths:
        cudnn, flash = (measure(length, name) for name in ("cudnn", "flash"))
        for name, (first, forward, backward) in (("cuDNN", cudnn), ("flash", flash)):
            ratio = f"{sum(flash[1:]) / sum(cudnn[1:]):17.2f}x" if name == "cuDNN" else ""
            print(f"{length:8}{name:>8}{first:10.1f}{forward:12.3f}{backward:13.3f}{ratio}")


def measure(length: int, name: str) -> tuple[float, float, float]:
    """Milliseconds: of the first pass forward and backward, and medians of later ones."""
    shapes = (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q, k, v = (torch.randn(length, heads, CHANNELS, **options).requires_grad_() for heads in shapes)
    segments = Segments((0, length), torch.tensor([0, length], device="cuda", dtype=torch.int32))
    scale = CHANNELS**-0.5
    times = []
    for _ in range(ROUNDS + 1):
        marks = [_now()]
        if name == "cudnn":
            out = long_sequence(q, k, v, scale)
        else:
            out = packed_flash(q, k, v, segments, segments, scale)
        marks.append(_now())
        out.backward(torch.ones_like(out))
        marks.append(_now())
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
    forward, backward = (median(column) for column in zip(*times[1:], strict=True))
    return sum(times[0]) * 1e3, forward * 1e3, backward * 1e3


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
