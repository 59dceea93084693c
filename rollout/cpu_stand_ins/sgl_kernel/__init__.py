"""Stand-in for sgl_kernel: every name can be imported; what has no plain-torch form raises when it is called.

`convert_weight_packed` is deliberately never registered as a torch operator: SGLang takes its absence as "no Intel AMX
kernels" and uses the native path on every CPU.
"""

from sgl_kernel import mamba, qwen35


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*arguments, **keywords):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return missing
