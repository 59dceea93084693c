"""Fixes for megatron-core 0.16.1 without Transformer Engine and Apex. Process-global, needed on every device.

Each function names the stock line that fails. B5 (expert gradients with TP but without EP) is fixed where the experts
are made (`actor.layers.experts`), B6 (replicated norms inside Gated DeltaNet) where gradients are finished
(`actor.models.build_model.reduce_replicated_gradients`).
"""

import sys
from typing import Any

import torch

from actor.megatron_patches.megatron_version import require_megatron_version


def install_fixes() -> None:
    """Install all fixes.

    Raises:
        ActorError: megatron-core is not the version they were written for.
    """
    require_megatron_version()
    _fix_version_check()
    _fix_router_gemm()
    _fix_optimizer_load()
    _fix_optimizer_init()
    _allow_optimizer_classes_in_checkpoints()


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


def _fix_optimizer_load() -> None:
    """distrib_optimizer.py:938 wants "step" per tensor (B4); :822 gives all parameters ONE step tensor (B3)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def set_states_that_are_saved(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return set_states(self, model_param, tensors)
        group_index, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][position]
        for key, destination in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if key in tensors:
                destination.data.copy_(tensors[key])
        return None

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for optimizer in [self.optimizer, *getattr(self.optimizer, "sub_optimizers", [])]:
            for state in optimizer.state.values():
                if torch.is_tensor(state.get("step")):
                    state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_that_are_saved
    DistributedOptimizer.load_state_dict = load_with_own_steps


def _allow_optimizer_classes_in_checkpoints() -> None:
    """HybridDeviceOptimizer keeps its optimizer classes in param_groups, so they end in common.pt (B4)."""
    torch.serialization.add_safe_globals([torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
