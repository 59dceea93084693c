"""Episodes of several turns as they went, to be read again: who wrote what, what it earned, and what is trained."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rlpipe.shared.sample import Episode, Sample, by_episode
from rlpipe.shared.turn import Turn

Transcript = dict[str, Any]
Decode = Callable[[Sequence[int]], str]


def has_turns(episode: Episode) -> bool:
    """Whether there is more to tell of an episode than of a response."""
    return len(episode) > 1 or any(sample.outcome is not None or len(sample.turns) > 1 for sample in episode)


def transcripts(samples: Sequence[Sample], count: int, decode: Decode) -> list[Transcript]:
    """`count` episodes of several turns, spread over `samples`. decode: token ids to text, special tokens included."""
    episodes = [episode for episode in by_episode(samples) if has_turns(episode)]
    stride = max(1, len(episodes) // max(1, count))
    return [transcript(episode, decode) for episode in episodes[::stride][:count]]


def transcript(episode: Episode, decode: Decode) -> Transcript:
    """One episode as JSON values: its sequences, each a list of segments that the policy or its surroundings wrote."""
    first = episode[0]
    reward, outcome = first.reward, first.outcome
    return {
        "episode": first.episode,
        "group": first.group_id,
        "task": first.prompt.prompt_id,
        "label": first.prompt.label,
        **({"reward": reward.score, "correct": reward.correct, "reason": reward.reason} if reward else {}),
        **({"outcome": asdict(outcome)} if outcome else {}),
        "sequences": [_sequence(sample, decode) for sample in episode],
    }


def _sequence(sample: Sample, decode: Decode) -> dict[str, Any]:
    segments, done = [], 0
    for turn in sample.turns:
        if turn.start > done:
            segments.append(_segment(sample, done, turn.start, decode))
        segments.append(_segment(sample, turn.start, turn.end, decode) | _told(sample, turn))
        done = turn.end
    if done < sample.response_tokens:
        segments.append(_segment(sample, done, sample.response_tokens, decode))
    return {
        "sample": sample.sample_id,
        "status": sample.status.value,
        "prompt": sample.prompt.text,
        "prompt_tokens": sample.prompt_tokens,
        "segments": segments,
    }


def _segment(sample: Sample, start: int, end: int, decode: Decode) -> dict[str, Any]:
    return {
        "text": decode(sample.response_ids[start:end]),
        "tokens": end - start,
        "trained_tokens": sum(sample.loss_mask[start:end]),
    }


def _told(sample: Sample, turn: Turn) -> dict[str, Any]:
    advantages = sample.token_advantages
    return {
        "turn": turn.number,
        "agent": turn.agent,
        "reward": turn.reward,
        "advantage": sample.advantage if advantages is None else advantages[turn.start],
        "model_seconds": turn.model_seconds,
        "tool_seconds": turn.tool_seconds,
        "tools": [asdict(use) for use in turn.tools],
    }
