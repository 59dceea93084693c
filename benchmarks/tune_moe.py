"""Measure block sizes of SGLang's fused MoE kernel for a shape and keep the fastest of each batch size as data.

    python benchmarks/tune_moe.py                  experts of Qwen3.5-35B-A3B, whole, into rollout/moe_kernel_blocks
    python benchmarks/tune_moe.py --width 256      the same over two GPUs of an engine

One GPU. Both products of a layer are timed, as CUDA graphs replay them, with tokens routed evenly. Printed: SGLang's
default, the best, and the floor, which reads every expert that has a token once, or computes at the card's speed.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Blocks = dict[str, int]

_BATCHES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_COMPILED_BATCHES = (16, 64, 256, 1024)
"""One of each class of batches: Triton compiles anew where a length is a multiple of 16, and candidates differ."""
_CALLS = 8
_REPLAYS = 3
_READ_BYTES_PER_SECOND = 4.0e12
_FLOPS_PER_SECOND = 790e12


@dataclass(frozen=True)
class Shape:
    """Of one layer's experts on one GPU. width: of an expert's hidden units there."""

    experts: int
    width: int
    hidden: int
    chosen: int

    def floor_seconds(self, tokens: int) -> float:
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        weights = 3 * self.hidden * self.width
        return max(
            2 * weights * touched / _READ_BYTES_PER_SECOND, 2 * weights * tokens * self.chosen / _FLOPS_PER_SECOND
        )


def main() -> None:
    options = _arguments()
    shape = Shape(options.experts, options.width, options.hidden, options.chosen)
    if options.compile_part is not None:
        _compile_part(shape, options.compile_part, options.processes)
        return
    _compile_all(options.processes)
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_config_file_name

    layer = Layer(shape)
    best = {}
    print(f"{'tokens':>8}{'default us':>12}{'best us':>10}{'ratio':>8}{'floor us':>10}  blocks")
    for tokens in _BATCHES:
        seconds = {_key(blocks): layer.seconds(blocks, tokens) for blocks in candidates(tokens)}
        key = min(seconds, key=lambda one: seconds[one])
        default = layer.seconds(default_blocks(tokens, shape), tokens)
        best[tokens] = dict(key)
        print(
            f"{tokens:8}{default * 1e6:12.1f}{seconds[key] * 1e6:10.1f}{default / seconds[key]:8.2f}"
            f"{shape.floor_seconds(tokens) * 1e6:10.1f}  {' '.join(str(value) for value in dict(key).values())}",
            flush=True,
        )
    _write(options.out, get_config_file_name(shape.experts, shape.width, None), best)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--width", type=int, default=512, help="of one expert on one GPU")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--out", type=Path, default=Path("rollout/moe_kernel_blocks"))
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def candidates(tokens: int) -> Iterator[Blocks]:
    """Blocks that may be fast for a batch of `tokens`; few tokens an expert need few rows."""
    if tokens <= 128:
        sides = itertools.product((16,), (64, 128, 256), (64, 128), (1,), (4, 8), (2, 3, 4, 5))
    elif tokens <= 512:
        sides = itertools.product((16, 32, 64), (64, 128, 256), (64, 128), (16,), (4, 8), (2, 3))
    else:
        sides = itertools.product((64, 128), (128, 256), (64,), (16,), (4, 8), (2, 3, 4))
    for rows, columns, depth, group, warps, stages in sides:
        if 2 * stages * depth * (rows + columns) <= 200_000:
            yield _blocks(rows, columns, depth, group, warps, stages)


def default_blocks(tokens: int, shape: Shape) -> Blocks:
    """What SGLang takes for bfloat16 where it has no file."""
    return _blocks(16, 32, 64, 1, 4, 3) if tokens <= shape.experts else _blocks(64, 64, 32, 8, 4, 3)


def _blocks(rows: int, columns: int, depth: int, group: int, warps: int, stages: int) -> Blocks:
    return {
        "BLOCK_SIZE_M": rows,
        "BLOCK_SIZE_N": columns,
        "BLOCK_SIZE_K": depth,
        "GROUP_SIZE_M": group,
        "num_warps": warps,
        "num_stages": stages,
    }


def _key(blocks: Blocks) -> tuple[tuple[str, int], ...]:
    return tuple(blocks.items())


class Layer:
    """Random experts of a shape, and both products of a batch with them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._up = self._random(shape.experts, 2 * shape.width, shape.hidden)
        self._down = self._random(shape.experts, shape.hidden, shape.width)

    def seconds(self, blocks: Blocks, tokens: int) -> float:
        """Of one layer; infinite where the kernel does not fit into the GPU's shared memory."""
        from triton.runtime.errors import OutOfResources

        try:
            return _graph_seconds(self.call(blocks, tokens))
        except OutOfResources:
            return float("inf")

    def call(self, blocks: Blocks, tokens: int) -> Callable[[], None]:
        import triton.language as tl
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
        from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

        shape = self.shape
        scores = torch.rand(tokens, shape.experts, device="cuda", generator=torch.Generator("cuda").manual_seed(tokens))
        weights, chosen = scores.topk(shape.chosen)
        chosen = chosen.to(torch.int32)
        routes = moe_align_block_size(chosen, blocks["BLOCK_SIZE_M"], shape.experts)
        inputs = self._random(tokens, shape.hidden)
        middle = self._random(tokens * shape.chosen, 2 * shape.width)
        gated = self._random(tokens * shape.chosen, shape.width)
        out = self._random(tokens, shape.chosen, shape.hidden)
        plain = {"use_fp8_w8a8": False, "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False}

        def product(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor, weighted: bool, top_k: int) -> None:
            invoke_fused_moe_kernel(
                *(left, right, None, into, None, None, None, weights, chosen, *routes, weighted, top_k, blocks),
                compute_type=tl.bfloat16,
                per_channel_quant=False,
                filter_expert=False,
                **plain,
            )

        def both() -> None:
            product(inputs, self._up, middle, False, shape.chosen)
            product(gated, self._down, out, True, 1)

        return both

    @staticmethod
    def _random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def _graph_seconds(call: Callable[[], None]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _CALLS)
    return min(times)


def _compile_all(processes: int) -> None:
    """Fill Triton's cache: each process compiles its share of all blocks, and the timing then finds them there."""
    command = [sys.executable, *sys.argv]
    children = [subprocess.Popen([*command, "--compile-part", str(part)]) for part in range(processes)]
    if any(child.wait() for child in children):
        sys.exit("a process that compiles failed; see the lines above")


def _compile_part(shape: Shape, part: int, parts: int) -> None:
    from triton.runtime.errors import OutOfResources

    every = [(blocks, tokens) for tokens in _COMPILED_BATCHES for blocks in candidates(tokens)]
    every += [(default_blocks(tokens, shape), tokens) for tokens in _COMPILED_BATCHES]
    layer = Layer(shape)
    for blocks, tokens in every[part::parts]:
        with suppress(OutOfResources):
            layer.call(blocks, tokens)()
    torch.cuda.synchronize()


def _write(folder: Path, name: str, best: dict[int, Blocks]) -> None:
    """Where SGLang looks, below a folder of its choice: configs/triton_VERSION/NAME."""
    import triton

    path = folder / "configs" / f"triton_{triton.__version__.replace('.', '_')}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({str(tokens): blocks for tokens, blocks in best.items()}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
