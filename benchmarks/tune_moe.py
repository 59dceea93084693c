"""Measure block sizes of SGLang's fused MoE kernel for a shape and keep the fastest of each batch size as data.

    python benchmarks/tune_moe.py                  experts of Qwen3.5-35B-A3B, whole, into rollout/moe_kernel_blocks
    python benchmarks/tune_moe.py --width 256      the same over two GPUs of an engine
    python benchmarks/tune_moe.py --fp8            experts in 8 bits by blocks of 128 x 128

One GPU. Both products of a layer are timed, as CUDA graphs replay them, with tokens routed evenly; in 8 bits each with
the kernel that quantises its input. Printed: SGLang's default, the best, and the floor, which reads every expert that
has a token once, or computes at the card's speed. In 8 bits each product has blocks of its own, but for their rows; the
table gives those of the first.
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
BlocksKey = tuple[tuple[str, int], ...]

_BATCHES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_COMPILED_BATCHES = (16, 64, 256, 1024)
"""One of each class of batches: Triton compiles anew where a length is a multiple of 16, and candidates differ."""
_CALLS = 8
_REPLAYS = 3
_READ_BYTES_PER_SECOND = 4.0e12
_FLOPS_PER_SECOND = 790e12
_QUANTIZED_BLOCK = 128
_SHARED_MEMORY_BYTES = 200_000
_PRODUCTS = ("up", "down")
_TMA = "USE_TMA"
"""Of the second product: both sides come through the tensor memory accelerator, tokens sorted by expert and padded."""


@dataclass(frozen=True)
class Shape:
    """Of one layer's experts on one GPU. width: of an expert's hidden units there."""

    experts: int
    width: int
    hidden: int
    chosen: int
    fp8: bool = False

    def floor_seconds(self, tokens: int) -> float:
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        weights = 3 * self.hidden * self.width
        return max(
            self.weight_bytes * weights * touched / _READ_BYTES_PER_SECOND,
            self.weight_bytes * weights * tokens * self.chosen / _FLOPS_PER_SECOND,
        )

    @property
    def weight_bytes(self) -> int:
        return 1 if self.fp8 else 2

    def files(self) -> dict[str, str]:
        """Where SGLang looks for the blocks of each product; one file where both have the same."""
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_config_file_name

        if not self.fp8:
            return {"up": get_config_file_name(self.experts, self.width, None)}
        block = [_QUANTIZED_BLOCK, _QUANTIZED_BLOCK]
        return {
            product: get_config_file_name(
                self.experts, self.width, "fp8_w8a8", block_shape=block, down_moe=product == "down"
            )
            for product in _PRODUCTS
        }


def main() -> None:
    options = _arguments()
    shape = Shape(options.experts, options.width, options.hidden, options.chosen, options.fp8)
    if options.compile_part is not None:
        _compile_part(shape, options.compile_part, options.processes)
        return
    _compile_all(options.processes)
    layer = Layer(shape)
    found: dict[str, dict[int, Blocks]] = {product: {} for product in _PRODUCTS}
    print(f"{'tokens':>8}{'default us':>12}{'best us':>10}{'ratio':>8}{'floor us':>10}  blocks")
    for tokens in _BATCHES:
        seconds, best = _best(layer, tokens)
        for product, blocks in best.items():
            found[product][tokens] = blocks
        blocks = default_blocks(tokens, shape)
        default = sum(layer.seconds(blocks, tokens, product) for product in _PRODUCTS)
        print(
            f"{tokens:8}{default * 1e6:12.1f}{seconds * 1e6:10.1f}{default / seconds:8.2f}"
            f"{shape.floor_seconds(tokens) * 1e6:10.1f}  {' '.join(str(value) for value in best['up'].values())}",
            flush=True,
        )
    for product, name in shape.files().items():
        _write(options.out, name, found[product])


def _best(layer: "Layer", tokens: int) -> tuple[float, dict[str, Blocks]]:
    """Seconds of both products, and their blocks: the same, or in 8 bits with the same rows, by which tokens are
    sorted once for both."""
    up, down = (
        {_key(blocks): layer.seconds(blocks, tokens, product) for blocks in candidates(tokens, layer.shape, product)}
        for product in _PRODUCTS
    )
    choices: list[tuple[float, BlocksKey, BlocksKey]] = []
    for first, seconds in up.items():
        same_rows = [key for key in down if dict(key)["BLOCK_SIZE_M"] == dict(first)["BLOCK_SIZE_M"]]
        second = min(same_rows, key=lambda key: down[key]) if layer.shape.fp8 else first
        choices.append((seconds + down[second], first, second))
    seconds, first, second = min(choices)
    return seconds, dict(zip(_PRODUCTS, (dict(first), dict(second)), strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--width", type=int, default=512, help="of one expert on one GPU")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    parser.add_argument("--out", type=Path, default=Path("rollout/moe_kernel_blocks"))
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def candidates(tokens: int, shape: Shape, product: str) -> Iterator[Blocks]:
    """Blocks that may be fast for a batch of `tokens`; few tokens an expert need few rows."""
    for sides in _fp8_sides(tokens) if shape.fp8 else _sides(tokens):
        rows, columns, depth, _, _, stages = sides
        if shape.weight_bytes * stages * depth * (rows + columns) <= _SHARED_MEMORY_BYTES:
            yield _blocks(*sides)
            if shape.fp8 and product == "down":
                yield _blocks(*sides) | {_TMA: True}


def _sides(tokens: int) -> Iterator[tuple[int, ...]]:
    if tokens <= 128:
        return itertools.product((16,), (64, 128, 256), (64, 128), (1,), (4, 8), (2, 3, 4, 5))
    if tokens <= 512:
        return itertools.product((16, 32, 64), (64, 128, 256), (64, 128), (16,), (4, 8), (2, 3))
    return itertools.product((64, 128), (128, 256), (64,), (16,), (4, 8), (2, 3, 4))


def _fp8_sides(tokens: int) -> Iterator[tuple[int, ...]]:
    """A step along the depth lies within one block of scales."""
    if tokens <= 128:
        return itertools.product((16,), (64, 128), (128,), (1,), (4, 8), (2, 3, 4, 5))
    if tokens <= 512:
        return itertools.product((16, 32, 64), (64, 128), (128,), (1, 16), (4,), (2, 3, 4))
    return itertools.product((64, 128), (64, 128), (128,), (16,), (4, 8), (3, 4))


def default_blocks(tokens: int, shape: Shape) -> Blocks:
    """What SGLang takes where it has no file."""
    if shape.fp8:
        return _blocks(64, _QUANTIZED_BLOCK, _QUANTIZED_BLOCK, 32, 4, 3)
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


def _key(blocks: Blocks) -> BlocksKey:
    return tuple(blocks.items())


class Layer:
    """Random experts of a shape, and the two products of a batch with them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        sizes = {"up": (2 * shape.width, shape.hidden), "down": (shape.hidden, shape.width)}
        self._weights = {product: self._random(shape.experts, *size) for product, size in sizes.items()}
        self._scales: dict[str, torch.Tensor | None] = dict.fromkeys(_PRODUCTS)
        if shape.fp8:
            for product, (rows, columns) in sizes.items():
                self._weights[product] = self._weights[product].to(torch.float8_e4m3fn)
                blocks = (rows // _QUANTIZED_BLOCK, columns // _QUANTIZED_BLOCK)
                self._scales[product] = torch.ones(shape.experts, *blocks, device="cuda")

    def seconds(self, blocks: Blocks, tokens: int, product: str) -> float:
        """Of one layer; infinite where the kernel does not fit into the GPU's shared memory."""
        from triton.runtime.errors import OutOfResources

        try:
            return _graph_seconds(self.call(blocks, tokens, product))
        except OutOfResources:
            return float("inf")

    def call(self, blocks: Blocks, tokens: int, product: str) -> Callable[[], None]:
        import triton.language as tl
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
        from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

        shape, is_up = self.shape, product == "up"
        scores = torch.rand(tokens, shape.experts, device="cuda", generator=torch.Generator("cuda").manual_seed(tokens))
        weights, chosen = scores.topk(shape.chosen)
        chosen = chosen.to(torch.int32)
        routes = moe_align_block_size(chosen, blocks["BLOCK_SIZE_M"], shape.experts)
        sizes, tma = {key: value for key, value in blocks.items() if key != _TMA}, bool(blocks.get(_TMA))
        middle = tokens * shape.chosen
        if tma:
            middle += min(middle, shape.experts + 1) * (blocks["BLOCK_SIZE_M"] - 1)
        left = self._random(tokens, shape.hidden) if is_up else self._random(middle, shape.width)
        width = 2 * shape.width if is_up else shape.hidden
        into = self._random(tokens * shape.chosen, width)
        if not is_up:
            into = into.view(tokens, shape.chosen, width)
        how = {"use_fp8_w8a8": shape.fp8, "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False}

        def multiply() -> None:
            invoke_fused_moe_kernel(
                *(left, self._weights[product], None, into, None, self._scales[product], None, weights, chosen),
                *(*routes, not is_up, shape.chosen if is_up else 1, sizes),
                compute_type=tl.bfloat16,
                per_channel_quant=False,
                block_shape=[_QUANTIZED_BLOCK, _QUANTIZED_BLOCK] if shape.fp8 else None,
                filter_expert=False,
                a_use_tma=tma,
                b_use_tma=tma,
                **how,
            )

        return multiply

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
    return float(min(times))


def _compile_all(processes: int) -> None:
    """Fill Triton's cache: each process compiles its share of all blocks, and the timing then finds them there."""
    command = [sys.executable, *sys.argv]
    children = [subprocess.Popen([*command, "--compile-part", str(part)]) for part in range(processes)]
    if any(child.wait() for child in children):
        sys.exit("a process that compiles failed; see the lines above")


def _compile_part(shape: Shape, part: int, parts: int) -> None:
    from triton.runtime.errors import OutOfResources

    every = [
        (blocks, tokens, product)
        for tokens, product in itertools.product(_COMPILED_BATCHES, _PRODUCTS)
        for blocks in [*candidates(tokens, shape, product), default_blocks(tokens, shape)]
    ]
    layer = Layer(shape)
    for blocks, tokens, product in every[part::parts]:
        with suppress(OutOfResources):
            layer.call(blocks, tokens, product)()
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
