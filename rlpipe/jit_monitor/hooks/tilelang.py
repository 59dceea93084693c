"""TileLang, which FlashQLA's kernels are written in."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks, wrap_method
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.shared.replaced_parts import replaces

replaces(
    "tilelang.jit.kernel:JITKernel.__init__",
    "tilelang.jit:JITImpl.compile",
    why="TileLang has no listener for compilations",
    drop_when="it has one",
)


def _watch_kernels(module: ModuleType, recorder: Recorder) -> Detach:
    """A kernel object is made by compiling, or from the disk cache with `from_database`."""

    def construct(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> None:
        function = args[0] if args else kwargs.get("func")
        compiled = not kwargs.get("from_database", False)
        with recorder.span("tilelang", _name_of(function), compiled=compiled):
            original(kernel, *args, **kwargs)

    return wrap_method(module.JITKernel, "__init__", construct)


def _watch_lowering(module: ModuleType, recorder: Recorder) -> Detach:
    """From the Python function to a kernel object: the time beside compiling is tracing and cache look-up."""

    def compile_function(original: Callable[..., Any], implementation: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(getattr(implementation, "func", None), "__name__", "unknown")
        with recorder.span("tilelang", name, "lowering", compiled=False):
            return original(implementation, *args, **kwargs)

    return wrap_method(module.JITImpl, "compile", compile_function)


def _name_of(function: Any) -> str:
    attributes = getattr(function, "attrs", None)
    if attributes and "global_symbol" in attributes:
        return str(attributes["global_symbol"])
    return str(getattr(function, "__name__", "unknown"))


HOOKS: Hooks = (("tilelang.jit.kernel", _watch_kernels), ("tilelang.jit", _watch_lowering))
