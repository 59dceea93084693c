"""Metrics of an iteration's samples, engines and packs."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from rlpipe.batching.prefix_tree import repeated_prefix_tokens
from rlpipe.config.root import Config
from rlpipe.estimate.decoding import drafts_slow_down
from rlpipe.generation.group_source import Batch
from rlpipe.shared.sample import Episode, Sample, Status, by_episode, is_truncated
from rlpipe.training.episode_metrics import episode_metrics
from rollout.dispatch import RoutingCounts
from rollout.requests import EngineUsage


def rollout_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """What was generated and how it was graded. `version`: the weights that the engines hold now."""
    episodes = by_episode(samples)
    rewards = [episode[0].reward for episode in episodes if episode[0].reward]
    scores = [reward.score for reward in rewards]
    verdicts = [reward.correct for reward in rewards if reward.correct is not None]
    lengths = [sample.response_tokens for sample in samples]
    spans = [span for sample in samples for span in sample.versions]
    metrics = {
        "rollout/samples_count": float(len(samples)),
        "rollout/episodes_count": float(len(episodes)),
        "rollout/failed_count": float(sum(episode[0].status is Status.FAILED for episode in episodes)),
        "rollout/reward_mean": fmean(scores),
        "rollout/reward_std": pstdev(scores),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": fmean(map(is_truncated, episodes)),
        "rollout/repeated_prefix_share": _repeated_share(samples, (sample.group_id for sample in samples)),
    }
    if len(episodes) < len(samples):
        metrics |= _branch_metrics(samples, episodes)
    metrics |= episode_metrics(episodes)
    if verdicts:
        metrics["rollout/accuracy"] = fmean(verdicts)
    if spans:
        tokens = sum(span.tokens for span in spans)
        metrics |= {
            "rollout/weight_version_lag_max": float(version - min(span.version for span in spans)),
            "rollout/weight_version_lag_mean": sum((version - span.version) * span.tokens for span in spans) / tokens,
            "rollout/off_policy_share": sum(span.tokens for span in spans if span.version != version) / tokens,
        }
    return metrics


def fault_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """What lost engines cost since the last iteration; all are there in every row."""
    return {
        "fault/engine_restarts_count": counts.get("engine_restarts", 0.0),
        "fault/requests_reissued_count": counts.get("requests_reissued", 0.0),
        "fault/answers_refused_count": counts.get("answers_refused", 0.0),
        "fault/lost_tokens": counts.get("tokens_lost", 0.0),
        "fault/healing_seconds": counts.get("healing_seconds", 0.0),
    }


def _branch_metrics(samples: Sequence[Sample], episodes: Sequence[Episode]) -> dict[str, float]:
    """Of episodes whose context was rewritten on the way."""
    return {
        "rollout/branches_mean": len(samples) / len(episodes),
        "rollout/branches_max": float(max(map(len, episodes))),
        "rollout/shared_tokens": float(sum(sample.shared_tokens for sample in samples)),
        "rollout/repeated_branch_share": _repeated_share(samples, (sample.episode for sample in samples)),
    }


def _repeated_share(samples: Sequence[Sample], names: Iterable[str]) -> float:
    """Of all tokens, context included, how many a pass over one tree for each name would not compute."""
    trees: dict[str, list[Sample]] = {}
    for name, sample in zip(names, samples, strict=True):
        trees.setdefault(name, []).append(sample)
    return sum(map(_repeated_tokens, trees.values())) / sum(sample.total_tokens for sample in samples)


def _repeated_tokens(samples: Sequence[Sample]) -> int:
    first, *others = (sample.prompt.token_ids for sample in samples)
    if all(prompt is first for prompt in others):
        return len(first) * len(others) + repeated_prefix_tokens([sample.response_ids for sample in samples])
    return repeated_prefix_tokens([sample.prompt.token_ids + sample.response_ids for sample in samples])


def start_metrics(usage: Sequence[EngineUsage], command_time: float) -> dict[str, float]:
    """For a run's first iteration. `command_time`: wall-clock time at which the command began."""
    first = [one.first_token_time for one in usage if one.first_token_time is not None]
    return {"perf/start_to_first_token_seconds": min(first) - command_time} if first else {}


def generation_metrics(batch: Batch, usage: Sequence[EngineUsage]) -> dict[str, float]:
    """Speed and idle time of generation, in all and of each engine, and what became of the groups."""
    idle = [1.0 - one.busy_seconds / one.interval_seconds for one in usage]
    rates = {f"perf/rollout_engine_{one.engine}_tokens_per_second": one.tokens_per_second for one in usage}
    return {
        "perf/rollout_seconds": batch.seconds,
        "perf/rollout_tokens_per_second": batch.tokens / batch.seconds,
        **({"perf/rollout_idle_share": fmean(idle)} if idle else {}),  # all engines may be lost just then
        **{name: rate for name, rate in rates.items() if rate},
        **batch.metrics,
    }


def draft_metrics(usage: Sequence[EngineUsage], config: Config) -> dict[str, float]:
    """How many drafted tokens engines kept, and how long they drafted; empty where none did."""
    passes: dict[int, int] = {}
    for one in usage:
        for kept, count in enumerate(one.kept_drafts):
            passes[kept] = passes.get(kept, 0) + count
    total = sum(passes.values())
    if not total:
        return {}
    draft = config.rollout.engine.draft
    deepest = max(passes)
    at_least = [sum(count for kept, count in passes.items() if kept > place) / total for place in range(deepest)]
    metrics = {
        "rollout/draft_pass_tokens": 1.0 + sum(kept * count for kept, count in passes.items()) / total,
        **{f"rollout/draft_kept_{place + 1}_share": share for place, share in enumerate(at_least)},
    }
    if draft.predicts:
        metrics["rollout/draft_kept_share"] = sum(at_least) / draft.steps
        metrics["rollout/draft_seconds"] = fmean(one.draft_seconds for one in usage)
    return metrics


def draft_warnings(metrics: Mapping[str, float]) -> list[str]:
    """Whether drafts cost more than they bring, of an iteration's metrics; `auto` leaves them out by itself then."""
    pass_tokens, break_even = metrics.get("rollout/draft_pass_tokens"), metrics.get("rollout/draft_break_even_tokens")
    if pass_tokens is None or break_even is None or not drafts_slow_down(pass_tokens, break_even):
        return []
    return [
        f"drafts slow generation down: a verified pass gives {pass_tokens:.2f} tokens, and it would take about "
        f"{break_even:.2f} to make up for drafting; set rollout.engine.draft.method to 'auto' or 'off', lower "
        "draft.steps, or train the prediction layer (actor.train_mtp)"
    ]


def cache_metrics(usage: Sequence[EngineUsage], routing: RoutingCounts) -> dict[str, float]:
    """What the engines' caches of prefixes saved, and how often a conversation lost its place in one."""
    prompt_tokens, cached_tokens = sum(one.prompt_tokens for one in usage), sum(one.cached_tokens for one in usage)
    return {
        "rollout/prefix_hit_share": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "rollout/prefill_saved_tokens": float(cached_tokens),
        "rollout/turns_moved_count": float(routing.moved_turns),
        "rollout/responses_moved_count": float(routing.moved_responses),
        "rollout/moved_tokens": float(routing.read_tokens),
    }
