"""Episodes of a run, each to be opened: turns with what they earned and cost, and what of the text is trained."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_LONGEST_CHARACTERS = 20_000


def episode_articles(episodes: Sequence[Mapping[str, Any]]) -> str:
    """The latest on top."""
    return "".join(map(_episode, reversed(episodes)))


def _episode(row: Mapping[str, Any]) -> str:
    sequences = [one for one in _list(row.get("sequences")) if isinstance(one, Mapping)]
    segments = [segment for one in sequences for segment in _segments(one)]
    turns = [segment for segment in segments if "turn" in segment]
    outcome = row.get("outcome") if isinstance(row.get("outcome"), Mapping) else {}
    assert isinstance(outcome, Mapping)
    facts = [
        f"iteration {row.get('iteration')}",
        f"reward {_number(row.get('reward'))}",
        f"{len({segment.get('turn') for segment in turns})} turns",
        *([f"{len(sequences)} sequences"] if len(sequences) > 1 else []),
        *([f"ended by {outcome.get('ended')}"] if outcome else []),
        f"{_sum(turns, 'model_seconds'):.2f} s of the model",
        f"{_sum(turns, 'tool_seconds'):.2f} s of tools",
        f"{_sum(segments, 'trained_tokens'):.0f} of {_sum(segments, 'tokens'):.0f} tokens trained",
    ]
    verdict = {True: " ✓", False: " ✗"}.get(row.get("correct"), "")  # type: ignore[arg-type]
    body = "".join(map(_sequence, sequences))
    state = outcome.get("state") or {}
    told = "".join(f"<small>{escape(str(name))}: {escape(str(value)[:200])}</small>" for name, value in state.items())
    return (
        f"<details class='episode'><summary><b>{escape(str(row.get('episode')))}</b>{verdict} "
        f"<span>{escape(' · '.join(facts))}</span></summary>{body}{told}</details>"
    )


def _sequence(sequence: Mapping[str, Any]) -> str:
    prompt = _text(sequence.get("prompt"), "prompt", f"{sequence.get('prompt_tokens')} tokens, not trained")
    return prompt + "".join(map(_segment, _segments(sequence)))


def _segment(segment: Mapping[str, Any]) -> str:
    if "turn" not in segment:
        return _text(segment.get("text"), "context", f"{segment.get('tokens')} tokens, not trained")
    notes = [f"turn {segment.get('turn')}"]
    if segment.get("agent"):
        notes.append(str(segment["agent"]))
    notes.append(f"{segment.get('trained_tokens')} of {segment.get('tokens')} tokens trained")
    notes += [f"{name} {_number(segment[name])}" for name in ("reward", "advantage") if segment.get(name) is not None]
    notes.append(f"model {_number(segment.get('model_seconds'))} s, tools {_number(segment.get('tool_seconds'))} s")
    for use in _list(segment.get("tools")):
        if isinstance(use, Mapping):
            notes.append(f"{use.get('name')} {use.get('failure') or 'ok'} {_number(use.get('seconds'))} s")
    return _text(segment.get("text"), "policy", " · ".join(notes))


def _text(text: Any, kind: str, note: str) -> str:
    shown = str(text or "")
    if len(shown) > _LONGEST_CHARACTERS:
        shown = f"{shown[:_LONGEST_CHARACTERS]}\n[{len(shown) - _LONGEST_CHARACTERS} further characters]"
    return f"<div class='{kind}'><small>{escape(note)}</small><pre>{escape(shown)}</pre></div>"


def _segments(sequence: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [segment for segment in _list(sequence.get("segments")) if isinstance(segment, Mapping)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _sum(segments: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(value for segment in segments if isinstance(value := segment.get(name), int | float))


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"
