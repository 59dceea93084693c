"""Triton: its compilation listener, and the autotuner, which has no hook."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks, wrap_method
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.shared.replaced_parts import relies_on, replaces

replaces(
    "triton.runtime.autotuner:Autotuner._bench",
    why="Triton has no listener for tuning runs",
    drop_when="it has one",
)
relies_on(
    "triton.knobs:compilation_knobs.listener",
    why="one listener hears of compilations; the one before it is called by ours",
    drop_when="Triton keeps several listeners",
)

MICROSECONDS = 1e-6


def _listen(knobs: ModuleType, recorder: Recorder) -> Detach:
    """There is one listener; the one before ours is called too."""
    previous = knobs.compilation.listener

    def listener(
        *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool
    ) -> None:
        name = str(metadata.get("name") or getattr(src, "name", "unknown"))
        key = str(metadata.get("hash", ""))
        recorder.record("triton", name, key, times.total * MICROSECONDS, compiled=not cache_hit)
        if previous is not None:
            previous(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)

    knobs.compilation.listener = listener

    def detach() -> None:
        if knobs.compilation.listener is listener:
            knobs.compilation.listener = previous

    return detach


def _watch_autotuner(module: ModuleType, recorder: Recorder) -> Detach:
    """Each configuration's benchmark is an event; the first of a tuning run, before the autotuner has remembered its
    winner, stands for the run. The path of an ordinary launch is not touched."""
    counted: dict[int, int] = {}  # autotuner -> winners it knew when its last run was counted

    def benchmark(original: Callable[..., Any], autotuner: Any, *args: Any, **kwargs: Any) -> Any:
        winners = len(autotuner.cache)
        first = counted.get(id(autotuner)) != winners
        counted[id(autotuner)] = winners
        name = getattr(autotuner.base_fn, "__name__", "unknown")
        with recorder.span("triton_autotune", name, str(kwargs.get("config", "")), compiled=first):
            return original(autotuner, *args, **kwargs)

    return wrap_method(module.Autotuner, "_bench", benchmark)


HOOKS: Hooks = (("triton.knobs", _listen), ("triton.runtime.autotuner", _watch_autotuner))
