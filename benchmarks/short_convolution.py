"""The short convolution of a Gated DeltaNet layer with SiLU and norm, by how far its kernels read ahead: milliseconds.

    python benchmarks/short_convolution.py [--tokens 8192 --sequences 4]

Qwen3.5-35B-A3B's shape: 16 heads of queries and of keys, 32 of values, 128 channels each. The floor is what copying as
many bytes takes: forward one tensor read and one written, backward two read and one written. `off`: the largest
difference of a gradient's norm from the one of the first row. Backward includes that zeros are made and copied for the
sections that pass without a convolution.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from device_timing import copied_bytes_per_second, seconds_per_call

from actor.layers import gdn_inputs

HEADS, CHANNELS, WIDTH = (16, 16, 32), 128, 4
VALUE_HEADS = HEADS[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of each sequence")
    parser.add_argument("--sequences", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    places = torch.from_numpy(np.tile(np.arange(options.tokens, dtype=np.int32), options.sequences)).cuda()
    convolved = sum(HEADS) * CHANNELS
    projected = _random(len(places), convolved + VALUE_HEADS * CHANNELS + 2 * VALUE_HEADS).requires_grad_()
    weights = [_random(heads * CHANNELS, WIDTH).requires_grad_() for heads in HEADS]
    bytes_moved = len(places) * convolved * 2
    copied = copied_bytes_per_second()
    floors = (2 * bytes_moved / copied * 1e3, 3 * bytes_moved / copied * 1e3)
    print(f"{torch.cuda.get_device_name()}, {options.sequences} x {options.tokens} tokens, {copied / 1e12:.2f} TB/s")
    print(f"floors, ms: forward {floors[0]:.3f}, backward {floors[1]:.3f}")
    print(f"{'stretch':>10}{'ahead':>8}{'forward':>10}{'backward':>10}{'off':>10}")
    norms = None
    for steps in (128, 256):
        for ahead in (2, 4, 8):
            gdn_inputs._STRETCH_STEPS, gdn_inputs._ROWS_AHEAD = steps, ahead
            forward, backward, found = _measure(projected, weights, places)
            norms = found if norms is None else norms
            off = float(((found - norms).abs() / norms).max())
            print(f"{steps:10}{ahead:8}{forward:10.3f}{backward:10.3f}{off:10.1e}", flush=True)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _measure(
    projected: torch.Tensor, weights: list[torch.Tensor], places: torch.Tensor
) -> tuple[float, float, torch.Tensor]:
    """Milliseconds of forward and backward, and norms of the gradients."""

    def outputs() -> tuple[torch.Tensor, ...]:
        heads: tuple[torch.Tensor, ...] = gdn_inputs.ProjectedHeads.apply(
            projected, *weights, places, CHANNELS, CHANNELS
        )
        return heads[:3]

    made = outputs()
    directions = [torch.ones_like(one) * 0.5 for one in made]
    leaves = [projected, *weights]
    gradients = torch.autograd.grad(made, leaves, directions)
    norms = torch.stack([one.float().norm() for one in gradients])

    def backward() -> object:
        return torch.autograd.grad(made, leaves, directions, retain_graph=True)

    made = outputs()
    return 1e3 * seconds_per_call(outputs), 1e3 * seconds_per_call(backward), norms


if __name__ == "__main__":
    main()
