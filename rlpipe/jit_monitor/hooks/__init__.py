"""One module for each compiler: where it compiles, and how to hear of it.

Each has `HOOKS`: pairs of a module's name and a function that attaches to the imported module and returns how to
detach. A hook must never change what is compiled, and costs nothing while nothing compiles.
"""

from rlpipe.jit_monitor.hooks import cute_dsl, dynamo, flashinfer, parallel_tuning, tilelang, triton, tvm_ffi
from rlpipe.jit_monitor.hooks.wrapping import Hooks


def all_hooks() -> Hooks:
    """Every hook that there is."""
    # What compiles candidates together comes first: the recorder's wrapper around it then sees the time it takes.
    compilers = (parallel_tuning, triton, dynamo, tilelang, cute_dsl, flashinfer, tvm_ffi)
    return tuple(hook for compiler in compilers for hook in compiler.HOOKS)
