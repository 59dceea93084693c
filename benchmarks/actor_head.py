"""The actor's head alone: log-probabilities and entropies of one pack and their gradients, in chunks of several sizes.

    python benchmarks/actor_head.py [--model Qwen3.5-35B-A3B] [--tokens 16384] [--chunks 1024,2048,4096] [--profile]
    python benchmarks/actor_head.py --tiny                  small sizes in float32, as on a CPU

`plain` has single operators of torch between the products, `ours` what training runs, on a GPU kernels of our own. The
floor: four products, of which one is done again, at the speed of a large one, and what lies between them at the speed
at which the device copies, each tensor once.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from device_timing import copied_bytes_per_second, product_flops_per_second, seconds_per_call
from kernel_groups import print_groups, profiled
from layer_shapes import text_model, tiny_model
from whole_step_setup import MODELS

import actor.head
from actor.device import compute_device, device_name, synchronize
from rlpipe.model.model_reader import describe_model

_ROUNDS = 3
_ELEMENTS_OF_A_LOGIT = 7  # written and read forward; written and read again, its gradient written and read twice


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = text_model(json.loads((MODELS / options.model / "config.json").read_text()))
    shape = describe_model(tiny_model(config) if options.tiny else config).shape
    dtype = torch.float32 if options.tiny else torch.bfloat16
    product = product_flops_per_second(512 if options.tiny else 8192, dtype)
    copied = copied_bytes_per_second()
    print(f"{device_name() or 'CPU'}, {dtype}: {options.tokens:,} tokens, {shape.hidden_size:,} channels, ", end="")
    print(
        f"vocabulary of {shape.vocab_size:,}; products {product / 1e12:.1f} TFLOP/s, copying {copied / 1e12:.2f} TB/s"
    )
    print(f"{'chunk':>10}{'floor ms':>12}{'plain ms':>12}{'ours ms':>12}{'ours GB':>10}")
    call = Pass(options.tokens, shape.hidden_size, shape.vocab_size, dtype)
    for chunk in options.chunks:
        floor = floor_seconds(call, chunk, product, copied)
        with plain_logits():
            plain = seconds_per_call(partial(call, chunk), _ROUNDS)
        ours = seconds_per_call(partial(call, chunk), _ROUNDS)
        peak = call.peak_bytes(chunk) / 1e9
        print(f"{chunk:>10,}{floor * 1e3:>12.1f}{plain * 1e3:>12.1f}{ours * 1e3:>12.1f}{peak:>10.2f}", flush=True)
        if options.profile:
            print_groups(profiled(partial(call, chunk)).times)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="Qwen3.5-35B-A3B", help="of configs/models")
    add("--tokens", type=int, default=0, help="trained ones of a pack; 16384, or 96 of a tiny model")
    add("--chunks", default="", help="tokens whose logits exist at a time, for instance 1024,4096")
    add("--profile", action="store_true", help="time by kind of kernel for each size")
    add("--tiny", action="store_true", help="small sizes and float32")
    options = parser.parse_args()
    options.tokens = options.tokens or (96 if options.tiny else 16384)
    chunks = options.chunks or ("16,32" if options.tiny else "1024,2048,4096,8192")
    options.chunks = [int(chunk) for chunk in chunks.split(",")]
    return options


class Pass:
    """Forward and backward over random hidden states, as a training step has them."""

    def __init__(self, tokens: int, channels: int, vocabulary: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(compute_device()).manual_seed(0)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=compute_device(), dtype=dtype, generator=generator)

        self.hidden, self.weight = drawn(tokens, channels).requires_grad_(), (0.02 * drawn(vocabulary, channels))
        self.weight.requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), device=compute_device(), generator=generator)

    def __call__(self, chunk: int) -> None:
        scores = actor.head.response_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            vocab_size=len(self.weight),
            chunk_tokens=chunk,
            with_entropy=True,
            entropy_gradient=False,
            group=dist.group.WORLD,
        )
        torch.autograd.grad(scores.logprobs.sum(), (self.hidden, self.weight))
        synchronize()

    def peak_bytes(self, chunk: int) -> int:
        """Beyond what is there before."""
        if not torch.cuda.is_available():
            return 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self(chunk)
        return torch.cuda.max_memory_allocated() - before


def floor_seconds(call: Pass, chunk: int, product: float, copied: float) -> float:
    """The weight's gradient is added up in float32 once for each chunk."""
    tokens, (vocabulary, channels) = len(call.targets), call.weight.shape
    element = call.weight.element_size()
    traffic = _ELEMENTS_OF_A_LOGIT * element * tokens * vocabulary
    traffic += -(-tokens // chunk) * (2 * element + 2 * 4) * vocabulary * channels
    return 4 * 2 * tokens * vocabulary * channels / product + traffic / copied


@contextmanager
def plain_logits() -> Iterator[None]:
    kernels = {name: getattr(actor.head, name) for name in ("softmax_parts", "logit_gradient")}
    for name, kernel in kernels.items():
        setattr(actor.head, name, kernel.__wrapped__)
    try:
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(actor.head, name, kernel)


if __name__ == "__main__":
    main()
