"""An episode of a run, as text: every sequence, turn by turn."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpipe.monitoring.json_lines import read_json_lines
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import DataError

_SHOWN = 12


def replay(run: Path, name: str) -> Iterator[str]:
    """Lines that tell the episode `name`; the names that there are where it is empty. `name` may be a part of one.

    Raises DataError where the run kept no episode, or none of that name, or several.
    """
    path = RunDirectory(run).episodes
    rows = [row for row in read_json_lines(path).rows if isinstance(row.get("episode"), str)]
    if not rows:
        raise DataError(
            f"{path}: no episode was kept; only those of several turns are, as many as "
            "rollout.generate.transcripts_per_iteration says"
        )
    if not name:
        yield from (f"{row['episode']}  iteration {row.get('iteration')}, reward {row.get('reward')}" for row in rows)
        return
    found = [row for row in rows if row["episode"] == name] or [row for row in rows if name in row["episode"]]
    if len(found) != 1:
        names = ", ".join(row["episode"] for row in (found or rows)[:_SHOWN])
        raise DataError(f"{path}: {len(found)} episodes are called {name!r}; there are {names}")
    yield from episode_lines(found[0])


def episode_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """A transcript (`rlpipe.monitoring.transcripts`), line by line."""
    yield f"episode {row['episode']}, iteration {row.get('iteration', '-')}, task {row.get('task')}"
    for sequence in row["sequences"]:
        yield f"\n--- sequence {sequence['sample']} ({sequence['status']})"
        yield f"[prompt, {sequence['prompt_tokens']} tokens]\n{sequence['prompt']}"
        for segment in sequence["segments"]:
            yield f"{_heading(segment)}\n{segment['text']}"
    outcome = row.get("outcome") or {}
    if "reward" in row:
        yield f"\nreward {row['reward']:.4g}, correct {row['correct']}: {row['reason']}"
    if outcome:
        yield f"ended by {outcome['ended']} after {outcome['turns']} turns, success {outcome['success']}"
        yield from (f"  {name}: {value}" for name, value in outcome["state"].items())


def _heading(segment: Mapping[str, Any]) -> str:
    if "turn" not in segment:
        return f"[context, {segment['tokens']} tokens, not trained]"
    facts = [f"turn {segment['turn']}", *([segment["agent"]] if segment["agent"] else [])]
    facts.append(f"{segment['trained_tokens']} of {segment['tokens']} tokens trained")
    facts += [f"{name} {segment[name]:.4g}" for name in ("reward", "advantage") if segment[name] is not None]
    facts.append(f"model {segment['model_seconds']:.2f} s, tools {segment['tool_seconds']:.2f} s")
    facts += [f"{use['name']}: {use['failure'] or 'ok'} in {use['seconds']:.2f} s" for use in segment["tools"]]
    return f"[{', '.join(facts)}]"
