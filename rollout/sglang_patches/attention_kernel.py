"""The attention kernels of an engine on a GPU, where SGLang's own choice is one that cannot run."""

import torch

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "sglang.kernels.ops.attention.flash_attention_v3:_load_fa3_kernels",
    why="SGLang takes FlashAttention-3 on every SM90 GPU, also where its kernel package lacks it",
    drop_when="SGLang asks whether the kernel is there",
)

_INSTEAD = "triton"


def supported_attention() -> tuple[str | None, str]:
    """SGLang's name of the kernels to take, None for its own choice; and a sentence for the user, empty without one.

    SGLang takes FlashAttention-3 on every SM90 GPU (server_args.py:5688), also where its kernel package lacks it.
    """
    from sglang.srt.utils.common import is_hopper_with_cuda_12_3

    if not is_hopper_with_cuda_12_3():
        return None, ""
    missing = _why_flash_attention_3_is_missing()
    if not missing:
        return None, ""
    return _INSTEAD, (
        f"engines use SGLang's {_INSTEAD} attention kernels, because FlashAttention-3 is not there ({missing}); set "
        "rollout.engine.sglang.attention_backend to choose others"
    )


def _why_flash_attention_3_is_missing() -> str:
    """Empty where it is there. Loads it as SGLang does."""
    try:
        from sglang.kernels.ops.attention.flash_attention_v3 import _load_fa3_kernels

        function = _load_fa3_kernels()["flash_attn_with_kvcache"]
        if function.__module__.startswith("sgl_kernel"):
            _ = torch.ops.sgl_kernel.fwd.default  # its Python part is there without the kernel, too
    except (ImportError, AttributeError) as error:
        return str(error).splitlines()[0]
    return ""
