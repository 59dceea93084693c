"""Instructions about the form of a response that a program can verify."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rewards.answers.extract import after_thinking
from rewards.ifeval_checks import CHECKS
from rlpipe.shared.sample import Reward

Score = Literal["all", "share"]


def ifeval(
    response: str,
    label: str,
    score: Score = "all",
    loose: bool = False,
    prompt: str = "",
    metadata: Mapping[str, object] | None = None,
) -> Reward:
    """1 if every instruction is followed, else 0; with `score: share` the share that is followed.

    The instructions of IFEval (arXiv 2311.07911), by the ids of its data set: columns `instruction_id_list` and
    `kwargs` of the row, or a JSON label with these keys. `loose` is its lenient accuracy: an instruction also counts as
    followed if it is without the first line, the last line, both, or asterisks. Raises ValueError for an unknown id.
    """
    answer = after_thinking(response).strip()
    instructions = _instructions(label, metadata or {})
    variants = _variants(answer) if loose else [answer]
    failed = [
        name
        for name, arguments in instructions
        if not any(_follows(name, arguments, variant, prompt) for variant in variants)
    ]
    followed = 1 - len(failed) / len(instructions)
    reason = f"not followed: {', '.join(failed)}" if failed else "all followed"
    return Reward(followed if score == "share" else float(not failed), not failed, reason, {"instructions": followed})


def _instructions(label: str, metadata: Mapping[str, object]) -> list[tuple[str, dict[str, Any]]]:
    source = metadata if "instruction_id_list" in metadata else _parsed(label)
    names = _parsed(source["instruction_id_list"])
    arguments = _parsed(source.get("kwargs")) or [{}] * len(names)
    if not names or len(names) != len(arguments):
        raise ValueError(f"{len(names)} instructions with {len(arguments)} kwargs: as many of both are needed")
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"instructions {unknown} are not known; known are {', '.join(sorted(CHECKS))}")
    # Data sets in columns give every instruction all arguments, None where they are not its own.
    given = [{key: value for key, value in (each or {}).items() if value is not None} for each in arguments]
    return list(zip(names, given, strict=True))


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return ast.literal_eval(value)


def _follows(name: str, arguments: dict[str, Any], text: str, prompt: str) -> bool:
    if name == "combination:repeat_prompt":
        arguments = {"prompt_to_repeat": prompt, **arguments}
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def _variants(text: str) -> Sequence[str]:
    lines = text.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    joined = ["\n".join(cut).strip() for cut in cuts]
    return joined + [variant.replace("*", "") for variant in joined]
