"""FLOPs of a model from its config and the real lengths of its sequences. Integers only, no torch."""

from rlpipe.flops.breakdown import FlopsBreakdown, Frozen, Part, PartFlops, SequenceCost, model_flops, sequence_cost
from rlpipe.flops.convention import Convention
from rlpipe.flops.hardware import KernelWork, Recompute, hardware_flops
from rlpipe.flops.lengths import batch_lengths
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.trained import weight_gradient_flops
from rlpipe.flops.utilization import tflops_per_gpu, utilization
from rlpipe.flops.vision import Grid

__all__ = [
    "Convention",
    "FlopsBreakdown",
    "Frozen",
    "Grid",
    "KernelWork",
    "ModelShape",
    "Part",
    "PartFlops",
    "Recompute",
    "SequenceCost",
    "batch_lengths",
    "hardware_flops",
    "model_flops",
    "sequence_cost",
    "tflops_per_gpu",
    "utilization",
    "weight_gradient_flops",
]
