"""FlashInfer: one ninja build for each operator, data type and head size."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks, wrap_method
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.shared.replaced_parts import replaces

replaces(
    "flashinfer.jit.core:JitSpec.build",
    why="FlashInfer has no listener for builds",
    drop_when="it has one",
)


def _watch_builds(module: ModuleType, recorder: Recorder) -> Detach:
    """Ninja leaves an up-to-date library alone: an unchanged file means that nothing was compiled."""

    def build(original: Callable[..., Any], spec: Any, *args: Any, **kwargs: Any) -> Any:
        before = _modified(spec.jit_library_path)
        span = recorder.open("flashinfer", str(spec.name))
        try:
            return original(spec, *args, **kwargs)
        finally:
            recorder.close(span, compiled=_modified(spec.jit_library_path) != before)

    return wrap_method(module.JitSpec, "build", build)


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


HOOKS: Hooks = (("flashinfer.jit.core", _watch_builds),)
