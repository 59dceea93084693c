"""The vision tower of Qwen-style vision-language models."""

from dataclasses import dataclass
from typing import NamedTuple


class Grid(NamedTuple):
    """One image or video in PATCHES: frames (after temporal patching), rows, columns; HF's `grid_thw`."""

    frames: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns


@dataclass(frozen=True)
class VisionTower:
    """A ViT whose attention is bidirectional within each FRAME, and a merger of `spatial_merge_size`^2 patches.

    input_values_per_patch: channels x temporal patch x height x width of a patch.
    deepstack_mergers: further mergers on inner layers (Qwen3-VL).
    """

    hidden_size: int
    intermediate_size: int
    depth: int
    input_values_per_patch: int
    spatial_merge_size: int
    output_size: int
    deepstack_mergers: int = 0

    def patch_embed_flops(self, grid: Grid) -> int:
        return 2 * self.hidden_size * self.input_values_per_patch * grid.patches

    def block_weights_flops(self, grid: Grid) -> int:
        """Query, key, value and output projections and the two-matrix feed-forward part of all blocks."""
        per_patch = 8 * self.hidden_size**2 + 4 * self.hidden_size * self.intermediate_size
        return self.depth * per_patch * grid.patches

    def attention_core_flops(self, grid: Grid) -> int:
        return self.depth * 4 * self.hidden_size * grid.frames * (grid.rows * grid.columns) ** 2

    def merger_flops(self, grid: Grid) -> int:
        merged_patches = grid.patches // self.spatial_merge_size**2
        width = self.hidden_size * self.spatial_merge_size**2
        return (1 + self.deepstack_mergers) * merged_patches * (2 * width**2 + 2 * width * self.output_size)

    def weights_flops(self, grid: Grid) -> int:
        return self.patch_embed_flops(grid) + self.block_weights_flops(grid) + self.merger_flops(grid)
