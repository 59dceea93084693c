"""TVM FFI, which compiles SGLang's own kernels: one ninja build for each kernel and its template arguments."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks, wrap_method
from rlpipe.jit_monitor.recorder import Recorder
from rlpipe.shared.replaced_parts import replaces

replaces(
    "tvm_ffi.cpp.extension:build_ninja",
    why="TVM FFI has no listener for builds",
    drop_when="it has one",
)


def _watch_builds(module: ModuleType, recorder: Recorder) -> Detach:
    """Ninja leaves an up-to-date library alone: unchanged libraries mean that nothing was compiled."""

    def build(original: Callable[[str], None], build_dir: str) -> None:
        before = _libraries(Path(build_dir))
        span = recorder.open("tvm_ffi", Path(build_dir).name)
        try:
            original(build_dir)
        finally:
            recorder.close(span, compiled=_libraries(Path(build_dir)) != before)

    return wrap_method(module, "build_ninja", build)


def _libraries(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.so")}


HOOKS: Hooks = (("tvm_ffi.cpp.extension", _watch_builds),)
