"""Sentences about what a run's numbers ask for: what takes the time, and what makes the result doubtful."""

from collections import Counter
from statistics import fmean

from rlpipe.estimate.decoding import drafts_slow_down
from rlpipe.monitoring.report.history import History
from rlpipe.shared.phases import PHASES, TRAINING_PARTS

_LARGE_PHASE_SHARE = 0.5
_SLOW_RANK_SHARE = 0.1
_EXCHANGE_SHARE = 0.15
_LOW_FILL_SHARE = 0.85
_UNACCOUNTED_SHARE = 0.02
_TRUNCATED_SHARE = 0.2
_MISMATCH_NATS = 0.05
_EQUAL_GROUPS_SHARE = 0.5
_LOST_ACCURACY = 0.05
_COLLAPSED_SHARE = 0.1
_LEAST_ITERATIONS = 5

_FOR_PHASE = {
    "rollout": "add engines, shorten responses, or let it run beside training (rollout.mode)",
    "reward": "raise reward.workers, or choose a cheaper grader",
    "weight_sync": "raise weight_sync.bucket_bytes, or place engines and actor closer together",
    "sleep_wake": "keep both sides in memory (ray.sleep), or give engines GPUs of their own",
    "checkpoint": "save less often, or to a faster disk",
    "eval": "evaluate less often or on fewer rows",
    "ref_logprob": "raise actor.forward_max_tokens_per_gpu, or do without the KL term",
    "forward": "give the actor more processes, or raise actor.max_tokens_per_gpu where memory allows",
    "backward": "give the actor more processes, or raise actor.max_tokens_per_gpu where memory allows",
    "optimizer": "lower actor.optimizer.cpu_offload_fraction if memory allows",
    "exchange": "see which rank the others wait for, or lower the parallel sizes",
}


def advice(history: History, skip_until: int = 1) -> list[str]:
    """Plain sentences that each name a remedy, the most important first; none where nothing asks
    for one. Iterations up to `skip_until` are warm-up if there are later ones."""
    rows = [row for row in history.trained if row["iteration"] > skip_until] or list(history.trained)
    if not rows:
        return []
    means = {name: fmean(row[name] for row in rows if name in row) for name in {name for row in rows for name in row}}
    return [
        *_learning(history),
        *_quality(means),
        *_time(means),
        *_ranks(history, means),
        *_compilation(history, skip_until),
    ]


def _learning(history: History) -> list[str]:
    sentences = []
    _, rewards = history.series("rollout/reward_mean")
    if rewards and not any(rewards):
        sentences.append(
            "No response was rewarded in any iteration, so nothing can be learned: read the samples and the grader's "
            "reasons below, choose easier prompts, or begin with supervised training (rlpipe sft, warm_start)."
        )
    for name in history.names("eval/", "/accuracy"):
        iterations, values = history.series(name)
        best = max(range(len(values)), key=values.__getitem__)
        if values[best] - values[-1] > _LOST_ACCURACY:
            sentences.append(
                f"Held-out accuracy ({name.split('/')[1]}) was {values[best]:.1%} at iteration {iterations[best]} and "
                f"ended at {values[-1]:.1%}: keep the best policy (checkpoint.save_hf: best), lower the learning rate, "
                "or stop earlier."
            )
    _, entropies = history.series("train/entropy")
    if len(entropies) >= _LEAST_ITERATIONS and 0 < entropies[-1] < _COLLAPSED_SHARE * entropies[0]:
        sentences.append(
            f"Entropy fell from {entropies[0]:.2f} to {entropies[-1]:.3f} nats: responses are hardly varied any more; "
            "lower the learning rate, or raise the upper clip or the KL term."
        )
    return sentences


def _time(means: dict[str, float]) -> list[str]:
    step = means.get("time/step_seconds", 0.0)
    if not step:
        return []
    shares = {phase: means.get(f"time/{phase}_seconds", 0.0) / step for phase in PHASES}
    largest = max(shares, key=lambda phase: shares[phase])
    sentences = []
    if shares[largest] >= _LARGE_PHASE_SHARE and largest in _FOR_PHASE:
        sentences.append(f"{largest} is {shares[largest]:.0%} of the step: {_FOR_PHASE[largest]}.")
    training = sum(shares[part] for part in TRAINING_PARTS)
    if largest != "exchange" and training and shares["exchange"] / training > _EXCHANGE_SHARE:
        sentences.append(
            f"Exchanges between ranks are {shares['exchange'] / training:.0%} of the training call: "
            f"{_FOR_PHASE['exchange']}."
        )
    unaccounted = means.get("time/unaccounted_share", 0.0)
    if unaccounted > _UNACCOUNTED_SHARE:
        sentences.append(f"{unaccounted:.1%} of the step belongs to no phase: something runs between the phases.")
    fill = means.get("pack/fill_share", 1.0)
    if fill < _LOW_FILL_SHARE:
        sentences.append(
            f"Packs are {fill:.0%} full: choose actor.max_tokens_per_gpu so that few packs are left short."
        )
    return sentences


def _ranks(history: History, means: dict[str, float]) -> list[str]:
    mean, most = means.get("ranks/compute_mean_seconds", 0.0), means.get("ranks/compute_max_seconds", 0.0)
    slowest = Counter(int(row["ranks/slowest"]) for row in history.trained if "ranks/slowest" in row)
    if not slowest or not mean or most / mean < 1 + _SLOW_RANK_SHARE:
        return []
    rank, times = slowest.most_common(1)[0]
    name = f"actor-{rank}"
    hosts = sorted({row["host"] for row in history.ranks if row["name"] == name})
    return [
        f"The slowest rank computes {most / mean - 1:.0%} longer than the mean; {times} of {slowest.total()} times it "
        f"is {name} on {', '.join(hosts) or 'an unknown host'}."
    ]


def _compilation(history: History, skip_until: int) -> list[str]:
    compiled = Counter(
        f"{event['kind']} {event['name']}"
        for event in history.jit_events
        if event.get("compiled") and event["iteration"] > skip_until
    )
    if not compiled:
        return []
    name, times = compiled.most_common(1)[0]
    return [
        f"{compiled.total()} compilations after iteration {skip_until}, most often {name} ({times}x): see docs/jit.md."
    ]


def _quality(means: dict[str, float]) -> list[str]:
    sentences = []
    truncated = means.get("rollout/truncated_share", 0.0)
    if truncated > _TRUNCATED_SHARE:
        sentences.append(f"{truncated:.0%} of the responses meet the token limit: raise rollout.max_response_tokens.")
    mismatch = means.get("mismatch/logprob_abs_mean", 0.0)
    if mismatch > _MISMATCH_NATS:
        sentences.append(
            f"SGLang and Megatron differ by {mismatch:.3f} nats a token on average: see docs/determinism.md."
        )
    pass_tokens = means.get("rollout/draft_pass_tokens", 0.0)
    if drafts_slow_down(pass_tokens, means.get("rollout/draft_break_even_tokens", 0.0)):
        sentences.append(
            f"A verified draft gave {pass_tokens:.2f} tokens on average, fewer than drafting costs: set "
            "rollout.engine.draft.method to auto or off, or train the prediction layer."
        )
    groups = means.get("advantage/groups_count", 0.0)
    equal = means.get("rollout/equal_reward_groups_count", 0.0)
    if groups and equal / groups > _EQUAL_GROUPS_SHARE:
        sentences.append(
            f"{equal / groups:.0%} of the groups have equal rewards and teach nothing: choose other prompts."
        )
    if means.get("train/updates_skipped_count", 0.0):
        sentences.append("Updates were skipped for non-finite values: see train/updates_skipped_count.")
    return sentences
