"""From what an engine printed to the one sentence that helps."""

import re
from pathlib import Path

from rlpipe.shared.disk_errors import FULL
from rlpipe.shared.errors import DiskFullError, EngineFailure, ModelError, ResourceError, RlpipeError, RolloutError
from rollout.arguments import EngineSetup

STARTS_AGAIN = "an engine starts again and prints from here on"
"""In an engine's log, after what the one before it printed, which was lost."""
_TAIL_BYTES = 16_384
_TAIL_LINES = 20
_SEARCHED_BYTES = 2**20  # each GPU of an engine has a process, which may print pages
_NO_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory|memory pool size is too small", re.I)
_KILLED = re.compile(r"died during initialization \(exit code: (-\d+)\)")  # by a signal, out of memory for instance
_EXCEPTION = re.compile(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.*)$")
_TRACEBACK = "Traceback (most recent call last):"
_PROCESS_FAILED = re.compile(r"^(?=\[[^\]]*\] \w+ hit an exception: Traceback)", re.M)
_ENDS_A_TRACEBACK = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*)(?:: (.*))?$")
"""Also what is not named an error: KeyboardInterrupt, Triton's OutOfResources."""


def log_tail(path: str, lines: int = _TAIL_LINES) -> str:
    """The last lines of an engine's log, or a remark that there are none."""
    try:
        text = _end_of(path, _TAIL_BYTES)
    except OSError:
        return "(no log)"
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(kept) or "(the log is empty)"


def printed_since_start(path: str) -> str:
    """What the engine of this log has printed since it started, of much the end; empty where there is no log."""
    try:
        return _end_of(path, _SEARCHED_BYTES).rpartition(STARTS_AGAIN)[2]
    except OSError:
        return ""


def _end_of(path: str, limit_bytes: int) -> str:
    with Path(path).open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - limit_bytes))
        return log.read().decode(errors="replace")


def start_failure(setup: EngineSetup, error: BaseException) -> RlpipeError:
    """The error of an engine that did not start, from SGLang's exception and its log: EngineFailure where somebody else
    ended a process of it."""
    text = f"{printed_since_start(setup.log_path)}\n{error}"
    who = f"engine {setup.index}"
    if killed := _KILLED.search(str(error)):
        return EngineFailure(
            f"{who} died while it started: SGLang's process ended with exit code {killed[1]}; log: {setup.log_path}"
        )
    if isinstance(error, OSError) and error.errno in FULL:
        place = error.filename or setup.log_path
        return DiskFullError(f"{who} could not start: {place}: {error.strerror}; free space there")
    if _NO_MEMORY.search(text):
        return ResourceError(
            f"{who} could not start: no free memory for its KV pool; lower rollout.engine.kv_cache_tokens, "
            f"max_running_requests or memory_fraction; log: {setup.log_path}"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = first_failure(text) or last_exception(text) or (lines[-1] if lines else "no message")
    return RolloutError(f"{who} could not start: {said}; log: {setup.log_path}")


def check_model_folder(setup: EngineSetup) -> None:
    """Raises ModelError when the folder lacks what an engine reads."""
    folder = Path(setup.model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json; model.path must be a folder in Hugging Face layout")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no *.safetensors file; model.path must hold the weights")
    if setup.needs_tokenizer and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelError(
            f"{folder}: no tokenizer (tokenizer.json); stop strings (rollout.sampling.stop) need it: add the "
            "tokenizer's files or use stop_token_ids"
        )


def first_failure(text: str) -> str | None:
    """The exception of the process of SGLang that failed first, or None where none says that it did.

    An engine has one for each of its GPUs. The others wait for it, and fail in turn for what they did not hear of it.
    """
    said = _PROCESS_FAILED.split(text)[1:]
    return last_exception(said[0]) if said else None


def last_exception(text: str) -> str | None:
    """The last line that reads `SomeError: message`, or that ends a traceback, whatever its exception is called."""
    found = None
    in_traceback = False
    for line in text.splitlines():
        match = _EXCEPTION.match(line.strip())
        if match is None and in_traceback:
            match = _ENDS_A_TRACEBACK.match(line)
        in_traceback = line.rstrip().endswith(_TRACEBACK) or (in_traceback and line.startswith(" "))
        if match and "Initialization failed" not in line:
            found = f"{match[1]}: {match[2]}" if match[2] else match[1]
    return found
