"""The one place that prepares torch and megatron-core in a worker: call `install_megatron_runtime` before all else."""

from functools import lru_cache

import torch

from actor.vector_math import choose_vector_kernels


@lru_cache(maxsize=1)
def install_megatron_runtime() -> None:
    """Install the patches that this process needs, and settle what threads would race for; further calls do nothing.

    The fixes for megatron-core without Transformer Engine apply on every device, the CPU layer only where there is no
    CUDA. All of it is process-global, so it belongs in a worker process and never in the driver or in pytest itself.

    Raises:
        ActorError: the installed megatron-core is not the version that the patches were written for.
    """
    from actor.megatron_patches.fixes import install_fixes

    choose_vector_kernels()
    if not torch.cuda.is_available():
        from actor.megatron_patches.cpu import install_cpu

        install_cpu()
    install_fixes()
