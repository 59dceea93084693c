"""An engine whose weights are FP8 by blocks, made of a folder whose are not.

SGLang quantises by blocks only what is stored so. It is told that the folder is, and gets its tensors quantised when it
reads them; which modules have FP8 weights follows one rule, here and for the tensors (rlpipe/shared/quantization.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlpipe.shared.block_fp8 import quantized
from rlpipe.shared.errors import RolloutError
from rlpipe.shared.quantization import is_quantized, is_quantized_module
from rlpipe.shared.replaced_parts import replaces
from rollout.weights.loader import one_by_one

_METHOD = replaces(
    "sglang.srt.layers.quantization.fp8:Fp8Config.get_quant_method",
    why="modules that stay in bfloat16 can only be listed one by one, by names that differ between families",
    drop_when="SGLang takes a pattern of modules to quantise",
)
_READ = replaces(
    "sglang.srt.model_loader.loader:DefaultModelLoader._get_all_weights",
    why="SGLang quantises by blocks only what is stored so",
    drop_when="quantization='fp8' with a block size takes a checkpoint in bfloat16",
)
_FIRST_WITH_FP8 = (8, 9)
"""On earlier ones SGLang lays 8-bit weights out anew for its kernels when it has read them, which updates do not."""


def install(quantization: str) -> None:
    """Call in a scheduler process of an engine with FP8 weights. Raises RolloutError on a GPU where SGLang would store
    them in another form than they are sent in, and on one without 8-bit products.

    quantization: `rollout.engine.quantization`.
    """
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_loader.loader import DefaultModelLoader

    capability = torch.cuda.get_device_capability()
    if capability < _FIRST_WITH_FP8:
        raise RolloutError(
            f"rollout.engine.quantization is {quantization!r}, but this GPU has compute capability "
            f"{capability[0]}.{capability[1]}, and products in 8 bits begin with 8.9: set it to 'none'"
        )
    if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
        raise RolloutError(
            f"rollout.engine.quantization is {quantization!r}, but on this GPU SGLang rounds the scales of blocks "
            "to powers of two, which updates do not: set it to 'none'"
        )
    Fp8Config.get_quant_method = _by_rule(_METHOD.original(), quantization)
    DefaultModelLoader._get_all_weights = _quantizing(_READ.original(), quantization)


def _by_rule(method: Callable[..., Any], quantization: str) -> Callable[..., Any]:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.radix_attention import RadixAttention

    def get_quant_method(config: Any, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RadixAttention):
            return None  # scales of the cache are 1; as parameters they would be lost when the engine sleeps
        if isinstance(layer, LinearBase) and not is_quantized_module(prefix, quantization):
            return UnquantizedLinearMethod()
        if isinstance(layer, FusedMoE) and not is_quantized_module(prefix, quantization):
            raise RolloutError(
                f"rollout.engine.quantization is {quantization!r}, but the model keeps experts as {prefix!r}, and "
                "tensors that are quantised are known by other names: set it to 'none'"
            )
        return method(config, layer, prefix)

    return get_quant_method


def _quantizing(read: Callable[..., Iterator[tuple[str, torch.Tensor]]], quantization: str) -> Callable[..., Any]:
    def get_all_weights(*arguments: Any, **keywords: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(*arguments, **keywords):
            here = tensor.cuda() if is_quantized(name, quantization) else tensor
            for part in quantized(name, here, quantization):
                yield from one_by_one(*part)

    return get_all_weights
