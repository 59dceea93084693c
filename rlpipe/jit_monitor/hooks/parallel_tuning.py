"""Triton's autotuner, made to compile all candidates of a tuning run at once, on all cores, before it measures them.

Triton compiles a candidate, measures it, compiles the next one, on one core. The kernels of Gated DeltaNet have 140
candidates of about half a second each; the machine code of each is the same as without this.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rlpipe.jit_monitor.compile_turns import after_the_first
from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks, wrap_method
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.shared.replaced_parts import relies_on, replaces

replaces(
    "triton.runtime.autotuner:Autotuner._bench",
    "triton.runtime.autotuner:Autotuner.run",
    why="Triton compiles the candidates of a tuning run one after the other, on one core",
    drop_when="its autotuner compiles them together",
)
relies_on(
    "triton.runtime._async_compile:AsyncCompileMode",
    why="it compiles in threads",
    drop_when="its autotuner compiles candidates together",
)

MOST_THREADS = 16
"""The front end of the compiler holds the interpreter's lock, so that more threads wait for each other."""


def _compile_candidates_together(module: ModuleType, recorder: Recorder) -> Detach:
    """The first measurement of a tuning run, before the autotuner has remembered its winner, compiles for all."""
    compiled: dict[int, int] = {}  # autotuner -> winners it knew when its candidates were compiled last

    def benchmark(original: Callable[..., Any], autotuner: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        winners = len(autotuner.cache)
        if _threads() > 1 and compiled.get(id(autotuner)) != winners:
            compiled[id(autotuner)] = winners
            _compile_candidates(autotuner, args, kwargs, recorder)
        return original(autotuner, *args, config=config, **kwargs)

    return wrap_method(module.Autotuner, "_bench", benchmark)


@contextmanager
def compiling_only(recorder: Recorder) -> Iterator[None]:
    """Within the block a kernel that would have to be tuned only has its candidates compiled: nothing is measured,
    nothing remembered, and the kernel does not run, so that what it was to write stays undefined."""
    from triton.runtime.autotuner import Autotuner

    def benchmark(original: Callable[..., Any], autotuner: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        _compile_candidates(autotuner, args, kwargs, recorder)
        raise _OnlyCompiledError

    def run(original: Callable[..., Any], autotuner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(autotuner, *args, **kwargs)
        except _OnlyCompiledError:
            return None

    undo = [wrap_method(Autotuner, "_bench", benchmark), wrap_method(Autotuner, "run", run)]
    try:
        yield
    finally:
        for take_back in undo:
            take_back()


class _OnlyCompiledError(Exception):
    """Ends a tuning run before its first measurement."""


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


def _compile_candidates(autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder) -> None:
    """Compile the candidates for this call and launch nothing; one process of the machine does, where several come with
    the same call. One that cannot be compiled is left to the tuning run, which counts it as infinitely slow."""
    from triton.runtime._async_compile import AsyncCompileMode

    candidates = autotuner.prune_configs(kwargs)
    name = getattr(autotuner.base_fn, "__name__", "unknown")
    constants = {key: value for key, value in sorted(kwargs.items()) if isinstance(value, int | float | str | None)}
    with (
        recorder.span("triton_autotune", name, f"{len(candidates)} candidates", compiled=False),
        after_the_first(f"{name} {constants}"),
        ThreadPoolExecutor(_threads(), thread_name_prefix="triton-compile") as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for candidate in candidates:
            autotuner.fn.run(*args, **{**kwargs, **candidate.all_kwargs(), "warmup": True})


HOOKS: Hooks = (("triton.runtime.autotuner", _compile_candidates_together),)
