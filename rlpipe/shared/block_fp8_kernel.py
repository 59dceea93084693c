"""One launch that quantises matrices by blocks: every weight is read once, and its 8 bits are written once.

Its numbers are those of `quantize_blocks`, bit by bit, which in torch's own operations moves ten times the bytes.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize_block(
    weights, numbers, scales, rows, columns, row_blocks, column_blocks, LARGEST: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program for each block of a matrix."""
    program = tl.program_id(0).to(tl.int64)
    matrix = program // (row_blocks * column_blocks)
    inside = program % (row_blocks * column_blocks)
    row = (inside // column_blocks) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = (inside % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (column < columns)
    places = matrix * rows * columns + row * columns + column
    values = tl.load(weights + places, mask=there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values))
    has_no_number = tl.max((values != values).to(tl.int32)) > 0  # the largest of a block may leave such ones out
    scale = tl.where((largest > 0) & (has_no_number == 0), tl.div_rn(largest, LARGEST), 1.0)
    quotients = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    quotients = tl.clamp(quotients, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers + places, quotients.to(tl.float8e4nv), mask=there)
    tl.store(scales + program, scale)


def quantize_matrices(matrices: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Write `numbers` and `scales` of `matrices`, all contiguous on one GPU.

    matrices: [matrices, rows, columns]; numbers: the same shape, float8_e4m3fn; scales: float32 [matrices, blocks,
    blocks].
    """
    count, rows, columns = matrices.shape
    _, row_blocks, column_blocks = scales.shape
    with torch.cuda.device(matrices.device):
        _quantize_block[(count * row_blocks * column_blocks,)](
            matrices,
            numbers,
            scales,
            rows,
            columns,
            row_blocks,
            column_blocks,
            LARGEST=torch.finfo(torch.float8_e4m3fn).max,
            BLOCK=block,
            num_warps=8,
        )
