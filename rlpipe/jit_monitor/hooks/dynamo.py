"""TorchDynamo and Inductor: `torch.compile`, its recompilations and CUDA-graph recordings."""

import sys
from types import CodeType, FrameType, ModuleType
from typing import Any

from rlpipe.jit_monitor.hooks.wrapping import Detach, Hooks
from rlpipe.jit_monitor.recorder import OpenSpan, Recorder
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "torch._dynamo.callback:CompilationCallbackHandler",
    "torch._dynamo.convert_frame:compile_frame",
    why="the handler's listeners hear of the outermost compilation, and the frame up the stack tells its function",
    drop_when="torch tells a listener the function's name, and keeps listeners over torch._dynamo.reset",
)


class _Listener:
    """Torch calls `start` and `end` around the outermost compilation of the process, perhaps from another thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: OpenSpan | None = None
        self._functions: dict[str, str] = {}

    def start(self, arguments: Any) -> None:
        # A compile id is frame/recompilation; the frame's number stays when a function is compiled again.
        frame_id = str(arguments.compile_id).partition("/")[0]
        code = _code_being_compiled()
        if code is not None:
            self._functions[frame_id] = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        name = self._functions.get(frame_id, f"frame {frame_id}")
        trigger = arguments.callback_trigger.name.lower()
        self._open = self._recorder.open("dynamo", name if trigger == "dynamo" else f"{name} {trigger}")

    def end(self, arguments: Any) -> None:
        span, self._open = self._open, None
        if span is not None:
            span.key = str(arguments.compile_id)
            self._recorder.close(span, compiled=True)


def _code_being_compiled() -> CodeType | None:
    """The `code` of dynamo's `compile_inner`, which is up the stack when it calls back."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_inner" and isinstance(code := frame.f_locals.get("code"), CodeType):
            return code
        frame = frame.f_back
    return None


def _listen(callback: ModuleType, recorder: Recorder) -> Detach:
    """`torch._dynamo.reset()` drops every callback, so ours come back whenever the handler is cleared."""
    handler, listener = callback.callback_handler, _Listener(recorder)
    clear = handler.clear

    def register() -> None:
        handler.register_start_callback(listener.start)
        handler.register_end_callback(listener.end)

    def clear_and_register() -> None:
        clear()
        register()

    register()
    handler.clear = clear_and_register

    def detach() -> None:
        del handler.clear
        handler.remove_start_callback(listener.start)
        handler.remove_end_callback(listener.end)

    return detach


HOOKS: Hooks = (("torch._dynamo.callback", _listen),)
