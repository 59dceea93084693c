"""What Ray says of a process that it lost or ended, as a sentence in place of its page."""

import re

import ray

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "ray.core.src.ray.raylet.raylet",
    texts=("Some common causes", "Worker exit detail: ", "Memory on the node (IP: "),
    why="Ray's message on a process that is gone is a page; one line of it says why",
    drop_when="its errors have the reason as an attribute",
)

ENDED = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Of a process that answers no more. Where a node's memory is nearly full Ray's monitor ends those that use most, and
tells calls to them so by an error that is no RayActorError."""

_IN_USE = re.compile(r"Memory on the node .* was ([\d.]+) ?GB(?: used)? / ([\d.]+) ?GB")


def why_ended(error: BaseException) -> str:
    """Of one of `ENDED`; of any other error its last line."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return _of_full_memory(str(error))
    for line in str(error).splitlines():
        if "exit" in line.lower() or "killed" in line.lower():
            return line.partition("Worker exit detail: ")[2].partition(" Some common causes")[0].strip(" .") or line
    return last_line(error)


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _of_full_memory(message: str) -> str:
    found = _IN_USE.search(message)
    used = f" ({found[1]} of {found[2]} GB were in use)" if found else ""
    return (
        f"Ray ended it because the memory of its node was nearly full{used}: `rlpipe plan` says what takes how much "
        "there; end what else uses the node, or set RAY_memory_usage_threshold to more than 0.95"
    )
