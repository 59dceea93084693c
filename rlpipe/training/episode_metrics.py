"""Metrics of episodes with several turns: turns, tools, what their environments tell."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from rlpipe.monitoring.transcripts import has_turns
from rlpipe.shared.sample import Episode
from rlpipe.shared.turn import Outcome, ToolUse, Turn


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of all episodes; nothing where each is one response of one turn."""
    if not any(map(has_turns, episodes)):
        return {}
    taken = [_turns(episode) for episode in episodes]
    outcomes = [episode[0].outcome for episode in episodes if episode[0].outcome is not None]
    generated = sum(turn.end - turn.start for turns in taken for turn in turns)
    trained = sum(sample.trained_tokens for episode in episodes for sample in episode)
    return {
        "episode/turns_mean": fmean(map(len, taken)),
        "episode/turns_max": float(max(map(len, taken))),
        "episode/model_mean_seconds": fmean(sum(turn.model_seconds for turn in turns) for turns in taken),
        "episode/tool_mean_seconds": fmean(sum(turn.tool_seconds for turn in turns) for turns in taken),
        "episode/trained_share": trained / max(1, generated),
        **_tool_metrics([use for turns in taken for turn in turns for use in turn.tools]),
        **_outcome_metrics(outcomes),
    }


def _turns(episode: Episode) -> list[Turn]:
    """Each once, however many branches hold it."""
    return list({turn.number: turn for sample in episode for turn in sample.turns}.values())


def _tool_metrics(uses: Sequence[ToolUse]) -> dict[str, float]:
    if not uses:
        return {}
    failures = Counter(use.failure for use in uses if use.failure)
    return {
        "episode/tool_calls_count": float(len(uses)),
        "episode/tool_failures_count": float(failures.total()),
        **{f"episode/tool_failures_{kind}_count": float(count) for kind, count in failures.items()},
        "episode/tool_call_max_seconds": max(use.seconds for use in uses),
        "episode/tool_retries_count": float(sum(use.retries for use in uses)),
        "episode/cut_answers_count": float(sum(use.cut for use in uses)),
        "episode/special_text_answers_count": float(sum(use.special_text for use in uses)),
    }


def _outcome_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    if not outcomes:
        return {}
    verdicts = [outcome.success for outcome in outcomes if outcome.success is not None]
    endings = Counter(outcome.ended for outcome in outcomes)
    states: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.state.items():
            if isinstance(value, int | float) and name.isidentifier():
                states.setdefault(name, []).append(float(value))
    return {
        **({"episode/success_share": fmean(verdicts)} if verdicts else {}),
        **{f"episode/ended_{reason}_count": float(count) for reason, count in endings.items()},
        "episode/cleanup_failures_count": float(sum(outcome.cleanup_failed for outcome in outcomes)),
        **{f"episode/state_{name}_mean": fmean(values) for name, values in states.items()},
    }
