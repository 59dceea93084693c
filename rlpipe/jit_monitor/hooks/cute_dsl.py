"""CuTe DSL, which FlashAttention-4 is written in. It compiles without a cache of its own."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks, wrap_method
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.shared.replaced_parts import replaces

replaces(
    "cutlass.base_dsl.compiler:CompileCallable._compile",
    why="CuTe DSL has no listener for compilations",
    drop_when="it has one",
)


def _watch_compiler(module: ModuleType, recorder: Recorder) -> Detach:
    def compile_function(original: Callable[..., Any], compiler: Any, *args: Any, **kwargs: Any) -> Any:
        function = args[0] if args else kwargs.get("func")
        name = getattr(function, "__name__", type(function).__name__)
        with recorder.span("cute_dsl", name):
            return original(compiler, *args, **kwargs)

    return wrap_method(module.CompileCallable, "_compile", compile_function)


HOOKS: Hooks = (("cutlass.base_dsl.compiler", _watch_compiler),)
