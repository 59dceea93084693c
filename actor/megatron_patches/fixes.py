"""Fixes for megatron-core 0.16.1 without Transformer Engine and Apex. Process-global, needed on every device.

Each function names the stock line that fails. B5 (expert gradients with TP but without EP) is fixed where the experts
are made (`actor.layers.experts`), B6 (replicated norms inside Gated DeltaNet) where gradients are finished
(`actor.models.build_model.reduce_replicated_gradients`); B3 and B4 (one step tensor for all, keys that are not saved)
do not happen, because `actor.optimizer_content` takes no plain values of the optimizer.
"""

import sys

import torch

from actor.megatron_patches.megatron_version import require_megatron_version
from rlpipe.shared.replaced_parts import replaces

replaces(
    "megatron.core.utils:is_te_min_version",
    why="it compares None with a version where Transformer Engine is absent (B2)",
    drop_when="it answers False there",
)
replaces(
    "megatron.core.transformer.moe.moe_utils:te_general_gemm",
    why="only the import of Transformer Engine defines the name that the router reads (B1)",
    drop_when="moe_utils defines it in every case",
)
replaces(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    why="shards of float32 parameters are views of leaves, which Adam refuses outside no_grad",
    drop_when="Megatron makes its optimizers under no_grad",
)


def install_fixes() -> None:
    """Install all fixes.

    Raises:
        ActorError: megatron-core is not the version they were written for.
    """
    require_megatron_version()
    _fix_version_check()
    _fix_router_gemm()
    _fix_optimizer_init()


def _fix_version_check() -> None:
    """utils.py:348 compares None with a version where Transformer Engine is absent (B2)."""
    import megatron.core.utils as utils
    from megatron.core.optimizer import optimizer_config  # noqa: F401  must be among the modules below

    if utils.get_te_version() is not None:
        return
    original = utils.is_te_min_version

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return False

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "is_te_min_version", None) is original:
            module.is_te_min_version = is_te_min_version  # type: ignore[attr-defined]


def _fix_router_gemm() -> None:
    """moe_utils.py:1192,1225 read `te_general_gemm`, which only the import of Transformer Engine defines (B1)."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _fix_optimizer_init() -> None:
    """hybrid_optimizer.py:57: shards of fp32 parameters are views of leaves, which Adam refuses outside no_grad."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.__init__ = torch.no_grad()(DistributedOptimizer.__init__)
