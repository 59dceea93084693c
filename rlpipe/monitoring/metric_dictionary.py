"""The metric dictionary. Dashboards, docs and tests are made from it or checked against it.

A name is `area/name`; the unit is its last word where it has one (`_seconds`, `_tokens`, `_bytes`, `_share`).
A part in braces stands for a name known at run time, for instance a data set.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import fmean

from rlpipe.shared.phases import PHASES


class Reduce(StrEnum):
    """How the values of several ranks or engines become the one that is logged."""

    NONE = "none"  # made by the driver, one value
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True)
class Metric:
    """One metric. `unit` is a plain word ("seconds", "tokens", "share", "count", "nats", "none")."""

    name: str
    unit: str
    meaning: str
    reduce: Reduce = Reduce.NONE


_STEP_PARTS = {
    **PHASES,
    "unaccounted": "time of the iteration that no phase claims",
    "step": "the whole iteration",
}

_RANK_PARTS = {
    "forward": "forward passes",
    "backward": "backward passes",
    "optimizer": "the optimizer",
    "exchange": "exchanges between ranks in the training call; the slowest rank has the least",
    "ref_logprob": "the reference pass, without exchanges",
    "old_logprob": "the pass for old log-probabilities, without exchanges",
    "compute": "all of these but the exchanges",
}

_START_PARTS = {
    "inputs": "reading model folder and data",
    "ray": "starting or joining Ray, reserving its resources",
    "engines": "waiting for engines, on shared GPUs before the actor is built or, with `ray.start: beside`, after it",
    "actor": "joining the actor's processes, building the model, loading its weights",
    "warm_up": "the actor's kernels: every class of pack",
    "policy": "loading a checkpoint, or the supervised warm start",
    "weights": "the first transfer of weights to the engines",
    "engine_import": "slowest engine: importing SGLang",
    "engine_load": "slowest engine: SGLang's start, weights and CUDA graphs included",
    "engine_warm_up": "slowest engine: every class of batch",
    "actor_import": "slowest actor process: importing torch, Megatron and kernels, beside the engines' start",
    "actor_compile": "slowest actor process: compiling the candidates of Gated DeltaNet's kernels, likewise",
    "actor_join": "slowest actor process: joining torch.distributed and Megatron's groups",
    "actor_build": "slowest actor process: model, weights and optimizer",
    "actor_build_model": "of this: modules and their parameters' memory",
    "actor_build_weights": "of this: reading the model folder",
    "actor_build_gradients": "of this: buffers of gradients, and how they are exchanged",
    "actor_build_optimizer": "of this: the optimizer and its states' memory",
    "total": "from the command to the first iteration",
}

SLEEP_WAKE_STEPS = {
    "engines_sleep": "engines give weights and KV cache back",
    "engines_idle": "of this: the slowest engine ends its work and empties its cache of prefixes",
    "actor_onload": "the actor takes memory for gradients, and its weights come back where they were freed",
    "actor_offload": "the actor gives gradients, activations and, where they have to go, weights back",
    "engines_wake": "engines take memory for weights and KV cache",
}

_DECLARED = [
    *(Metric(f"start/{part}_seconds", "seconds", f"start: {meaning}") for part, meaning in _START_PARTS.items()),
    Metric("start/kv_pool_tokens", "tokens", "start: the KV pool of the engine with the smallest one"),
    *(
        Metric(f"sleep_wake/{step}_seconds", "seconds", f"shared GPUs: {meaning}")
        for step, meaning in SLEEP_WAKE_STEPS.items()
    ),
    *(
        Metric(f"ranks/{part}_{reduce}_seconds", "seconds", f"{reduce} over ranks: {meaning}")
        for part, meaning in _RANK_PARTS.items()
        for reduce in ("min", "mean", "max")
    ),
    Metric("ranks/slowest", "rank", "training rank that computes longest; its host is in ranks.jsonl"),
    *(Metric(f"time/{name}_seconds", "seconds", meaning) for name, meaning in _STEP_PARTS.items()),
    Metric("time/unaccounted_share", "share", "unaccounted time over the iteration's time"),
    Metric("rollout/reward_mean", "none", "mean score of the iteration's episodes"),
    Metric("rollout/reward_std", "none", "standard deviation of the scores"),
    Metric("rollout/accuracy", "share", "share of episodes graded correct"),
    Metric("rollout/response_tokens_mean", "tokens", "mean length of a sample's response"),
    Metric("rollout/response_tokens_max", "tokens", "longest response"),
    Metric("rollout/truncated_share", "share", "share of episodes of which a part met the token limit"),
    Metric("rollout/samples_count", "count", "samples generated: the branches of all episodes"),
    Metric("rollout/episodes_count", "count", "episodes generated, one for each request to a prompt"),
    Metric("rollout/branches_mean", "count", "samples of an episode, where some have several"),
    Metric("rollout/branches_max", "count", "the most samples of an episode, likewise"),
    Metric(
        "rollout/shared_tokens",
        "tokens",
        "sampled tokens in the context of further branches, where they are not trained again",
    ),
    Metric(
        "rollout/repeated_prefix_share",
        "share",
        "tokens, prompts included, that repeat the beginning of another sequence of their group: a pass over a tree of "
        "each group would not compute them",
    ),
    Metric("rollout/repeated_branch_share", "share", "the same, among the branches of each episode alone"),
    Metric("rollout/failed_count", "count", "episodes without a usable response"),
    Metric(
        "rollout/equal_reward_groups_count",
        "count",
        "groups of several episodes whose scores, penalties included, are all the same",
    ),
    Metric(
        "rollout/weight_version_lag_max",
        "versions",
        "current weight version less the oldest one sampled with",
    ),
    Metric("rollout/weight_version_lag_mean", "versions", "the same, mean over response tokens"),
    Metric("rollout/off_policy_share", "share", "share of response tokens that older weights sampled"),
    Metric("rollout/groups_started_count", "count", "groups started"),
    Metric("rollout/groups_dropped_{reason}_count", "count", "groups that are not trained, by reason"),
    Metric("rollout/missing_groups_count", "count", "groups given up because of `rollout.max_groups_factor`"),
    Metric("rollout/groups_carried_count", "count", "interrupted groups that go on in the next iteration"),
    Metric(
        "rollout/tail_lost_share",
        "share",
        "mode `sync`: share of the engines' room for responses that stood empty while the last ones were written",
    ),
    Metric("rollout/tail_seconds", "seconds", "mode `sync`: time in which less than half of that room was used"),
    Metric("rollout/samples_continued_count", "count", "interrupted responses that went on"),
    Metric("rollout/samples_restarted_count", "count", "responses begun again because their beginning was too old"),
    Metric("episode/turns_mean", "count", "turns of the policy in an episode, where some have several"),
    Metric("episode/turns_max", "count", "most turns of an episode, likewise"),
    Metric("episode/model_mean_seconds", "seconds", "time that the policy's turns of an episode took"),
    Metric("episode/tool_mean_seconds", "seconds", "time that environment and tools took to answer in an episode"),
    Metric("episode/trained_share", "share", "tokens that are trained over tokens that the policy wrote in episodes"),
    Metric("episode/tool_calls_count", "count", "calls of tools"),
    Metric("episode/tool_failures_count", "count", "of these, those that failed"),
    Metric("episode/tool_failures_{kind}_count", "count", "the same by kind: malformed, arguments, timeout, ..."),
    Metric("episode/tool_call_max_seconds", "seconds", "longest call of a tool, waiting and retries included"),
    Metric("episode/tool_retries_count", "count", "further tries of calls"),
    Metric("episode/cut_answers_count", "count", "answers of tools that were longer than allowed"),
    Metric("episode/special_text_answers_count", "count", "answers with text of special tokens, which stayed text"),
    Metric("episode/success_share", "share", "episodes that their environment calls a success"),
    Metric("episode/ended_{reason}_count", "count", "episodes by what ended them: done, turns, seconds, tokens"),
    Metric("episode/cleanup_failures_count", "count", "environments that did not give back what they held, or late"),
    Metric("episode/state_{name}_mean", "none", "a number of the environment's state at the end of an episode"),
    Metric("agent/requests_count", "count", "responses that agents asked the policy for"),
    Metric("agent/continued_requests_count", "count", "of these, those that went on where an earlier one had ended"),
    Metric("agent/divergences_count", "count", "of these, those whose context was rewritten, which opens a branch"),
    Metric("agent/refused_requests_count", "count", "requests that could not be served; the agent was told why"),
    Metric("agent/context_overflows_count", "count", "requests without room for a response"),
    Metric("agent/overridden_sampling_count", "count", "requests that asked for another temperature or the like"),
    Metric("agent/abandoned_responses_count", "count", "responses that came after the agent had hung up"),
    Metric("agent/special_text_requests_count", "count", "requests with text of special tokens, which stayed text"),
    Metric("agent/tool_calls_count", "count", "tool calls that the policy made"),
    Metric("agent/malformed_tool_calls_count", "count", "responses whose tool calls could not be read"),
    Metric("agent/unenforced_formats_count", "count", "responses to requests for JSON, which no grammar enforced"),
    Metric("agent/unfit_responses_count", "count", "of these, those that were not the JSON that was asked for"),
    Metric("agent/failures_count", "count", "episodes whose agent failed"),
    Metric("agent/timeouts_count", "count", "of these, those that met the time limit"),
    Metric("agent/interruptions_count", "count", "times an agent had to wait because generation was interrupted"),
    Metric(
        "agent/driver_mean_seconds",
        "seconds",
        "from a request to its answer without waiting for engines, but with waiting for other requests",
    ),
    Metric("rollout/prefix_hit_share", "share", "share of prompt tokens that an engine had in its cache of prefixes"),
    Metric("rollout/prefill_saved_tokens", "tokens", "prompt tokens not computed because an engine had them"),
    Metric(
        "rollout/turns_moved_count",
        "count",
        "turns of conversations that left their engine, which was lost or overloaded",
    ),
    Metric(
        "rollout/responses_moved_count",
        "count",
        "responses that went on at another engine while they were written (`rollout.migration`)",
    ),
    Metric("rollout/moved_tokens", "tokens", "of these, with their prompts, that the other engine computed again"),
    Metric(
        "rollout/draft_pass_tokens",
        "tokens",
        "tokens of a response from a pass that verified its drafts, with the one that is sampled anyway; 1 without use",
    ),
    Metric("rollout/draft_kept_share", "share", "share of the prediction layer's drafts that were kept"),
    Metric(
        "rollout/draft_kept_{position}_share",
        "share",
        "share of passes whose draft was kept up to this position at least",
    ),
    Metric(
        "rollout/draft_seconds",
        "seconds",
        "that the prediction layer took of an engine's device, before and after passes that verify; mean over engines",
    ),
    Metric(
        "rollout/draft_break_even_tokens",
        "tokens",
        "what such a pass must give for drafts to cost no time, by the model of `rlpipe plan`",
    ),
    Metric("advantage/groups_count", "count", "groups that advantages were computed from"),
    Metric("advantage/failed_samples_count", "count", "episodes left out because generation failed"),
    Metric("advantage/singleton_groups_count", "count", "groups with one episode left, whose advantage is 0"),
    Metric("advantage/short_groups_count", "count", "groups with fewer episodes than the largest one"),
    Metric("advantage/truncated_masked_count", "count", "truncated episodes left out of the loss"),
    Metric("advantage/overlong_penalized_count", "count", "episodes with a penalty for their length"),
    Metric("advantage/kl_penalty_mean", "none", "mean KL penalty per response token, with its coefficient"),
    Metric(
        "advantage/lone_turns_count",
        "count",
        "turns that no other episode of their group reaches, whose turn-level advantage is 0",
    ),
    Metric("advantage/abs_mean", "none", "mean absolute advantage"),
    Metric(
        "perf/rollout_tokens_per_second",
        "tokens/second",
        "response tokens, those of dropped groups too, over the time given to generating them: the rollout phase, or, "
        "where generation runs beside training, from batch to batch",
    ),
    Metric("perf/rollout_idle_share", "share", "time without a running request, mean over engines"),
    Metric("perf/actor_idle_share", "share", "time outside of the actor's passes and updates"),
    Metric(
        "perf/rollout_engine_{engine}_tokens_per_second",
        "tokens/second",
        "the same for one engine, over its busy time",
    ),
    Metric("perf/rollout_seconds", "seconds", "time given to generating the iteration's batch"),
    Metric(
        "perf/rollout_tokens_per_gpu_per_second",
        "tokens/second",
        "response tokens over the rollout phase and the devices of all engines",
    ),
    Metric("perf/trained_tokens", "tokens", "prompt and response tokens of the update"),
    Metric(
        "perf/tokens_per_gpu_per_second",
        "tokens/second",
        "trained tokens over the whole step and all GPUs of the run; on CPUs over processes of actor and engines",
    ),
    Metric("perf/actor_train_seconds", "seconds", "the training call"),
    Metric("perf/train_seconds", "seconds", "log-probability passes, advantages, packs and the training call"),
    Metric("perf/actor_tokens_per_second", "tokens/second", "trained tokens over the training call, the whole job"),
    Metric("perf/actor_tokens_per_gpu_per_second", "tokens/second", "the same for each of the actor's processes"),
    Metric(
        "perf/actor_train_tflops_per_gpu",
        "TFLOP/second",
        "training FLOPs of the model (causal half, no recomputation) over the training call and the actor's processes",
    ),
    Metric("perf/ref_logprob_tflops_per_gpu", "TFLOP/second", "forward FLOPs over the reference pass, likewise"),
    Metric("perf/actor_train_mfu", "share", "those training FLOPs per second over the device's dense bf16 peak"),
    Metric("perf/actor_train_mfu_excluding_jit", "share", "MFU of the training call less its `perf/jit_seconds`"),
    Metric(
        "perf/actor_train_hfu",
        "share",
        "the same with executed FLOPs: padding, recomputation, what kernels compute twice",
    ),
    Metric(
        "perf/jit_seconds",
        "seconds",
        "compiling, tuning and communicator set-up on the slowest actor process and in the slowest engine",
    ),
    Metric("perf/jit_compiles", "count", "kernels and functions compiled, all actor processes and engines"),
    Metric("perf/jit_alarms", "count", "kernels that compiled after warm-up, likewise"),
    Metric("perf/jit_stalls", "count", "calls whose stacks were dumped because they took far longer than usual"),
    Metric("perf/step_excluding_jit_seconds", "seconds", "the step less `perf/jit_seconds`"),
    Metric(
        "perf/optimizer_exposed_share",
        "share",
        "optimizer time that nothing hides (`time/optimizer_seconds`) over the training call",
    ),
    Metric(
        "perf/start_to_first_token_seconds",
        "seconds",
        "from the start of the command to the first token that an engine generated; in the first iteration only",
    ),
    Metric(
        "memory/actor_gpu_peak_bytes",
        "bytes",
        "most that a GPU held while the actor worked: what torch reserved at the peak and all beside it",
        Reduce.MAX,
    ),
    Metric(
        "memory/actor_gpu_allocated_peak_bytes",
        "bytes",
        "most that the actor's tensors took on a GPU, of the rank that took most",
        Reduce.MAX,
    ),
    Metric("memory/engine_gpu_peak_bytes", "bytes", "most that a GPU held while its engine generated", Reduce.MAX),
    Metric("memory/actor_host_peak_bytes", "bytes", "largest resident size since the start, all ranks", Reduce.SUM),
    Metric("memory/engine_host_peak_bytes", "bytes", "the same of all engines' processes", Reduce.SUM),
    Metric("memory/host_used_bytes", "bytes", "host memory in use on the fullest node after the update", Reduce.MAX),
    Metric(
        "ranks/checkpoint_wait_seconds",
        "seconds",
        "an update waited until the states before it were written, on the slowest rank; part of optimizer",
        Reduce.MAX,
    ),
    Metric("ranks/unknown_exchanges", "count", "calls of torch's operations that the table lacks", Reduce.SUM),
    Metric("guard/checks", "count", "collectives preceded by a look at free device memory", Reduce.SUM),
    Metric("guard/skips", "count", "collectives of devices that the policy lets pass", Reduce.SUM),
    Metric("guard/cleanups", "count", "times PyTorch's unused memory was given back", Reduce.SUM),
    Metric("guard/probe_seconds", "seconds", "asking the driver, on the rank where it took longest", Reduce.MAX),
    Metric("guard/cleanup_seconds", "seconds", "giving memory back, on the rank where it took longest", Reduce.MAX),
    Metric("reward/timeouts_count", "count", "responses whose grading met the time limit"),
    Metric("reward/errors_count", "count", "responses whose grading raised an error or crashed its process"),
    Metric(
        "reward/format_share", "share", "share of responses whose answer stood where the grader's convention wants it"
    ),
    Metric("reward/{component}_mean", "none", "mean of one component of the reward"),
    Metric("pack/packs_count", "count", "packs of the iteration, all ranks"),
    Metric("pack/fill_share", "share", "real tokens over the capacity of all packs"),
    Metric(
        "pack/advised_saved_share", "share", "share of packs that a budget within 15 % of the present one would save"
    ),
    Metric("pack/dummy_packs_count", "count", "packs without samples that keep ranks in step"),
    Metric("pack/padding_tokens", "tokens", "alignment padding in packs"),
    Metric("pack/rank_imbalance", "none", "largest over mean cost of the data-parallel ranks"),
    Metric("pack/slot_imbalance", "none", "the same where ranks wait for each other after every pack"),
    Metric("pack/oversize_count", "count", "samples longer than a pack, left out of the update"),
    Metric("train/loss", "none", "the optimized loss"),
    Metric("train/policy_loss", "none", "policy term of the loss"),
    Metric("train/kl_loss", "nats", "KL term before its coefficient"),
    Metric("train/mtp_loss", "nats", "multi-token-prediction loss before its weight, where those layers are trained"),
    Metric("train/entropy", "nats", "mean token entropy of the policy"),
    Metric("train/clip_share", "share", "share of tokens whose ratio was clipped"),
    Metric("train/dual_clip_share", "share", "share of tokens whose loss the dual clip bounded"),
    Metric("train/ratio_mean", "none", "mean importance ratio"),
    Metric("train/gradient_norm", "none", "global gradient norm before clipping, dense and expert parameters"),
    Metric("train/learning_rate", "none", "learning rate of the update"),
    Metric("train/updates_attempted_count", "count", "optimizer steps attempted in this run so far"),
    Metric("train/updates_applied_count", "count", "optimizer steps applied in this run so far"),
    Metric(
        "train/updates_skipped_count",
        "count",
        "optimizer steps skipped for a non-finite loss or gradient so far",
    ),
    Metric(
        "mismatch/logprob_abs_max",
        "nats",
        "largest |SGLang - Megatron| log-probability of a sampled token, before the first update of an iteration",
    ),
    Metric("mismatch/logprob_abs_mean", "nats", "mean of the same"),
    Metric("mismatch/weight_mean", "none", "mean importance weight of the mismatch correction"),
    Metric("mismatch/masked_share", "share", "share of tokens that the mismatch correction masks"),
    Metric("weight_sync/version", "versions", "weight version that the engines hold"),
    Metric("weight_sync/bytes", "bytes", "bytes sent to one engine"),
    Metric(
        "weight_sync/sender_max_bytes",
        "bytes",
        "most bytes that one process of the actor handed to an engine; where several send, each has a share",
    ),
    Metric("weight_sync/gigabytes_per_second", "gigabytes/second", "bytes over the seconds of the transfer"),
    Metric(
        "fault/actor_restarts_count", "count", "starts of the actor in place of a lost one, up to the first row after"
    ),
    Metric("fault/engine_restarts_count", "count", "engines started in the places of lost ones"),
    Metric("fault/requests_reissued_count", "count", "requests of lost engines that were made again"),
    Metric("fault/answers_refused_count", "count", "answers that could not be used; their engines were restarted"),
    Metric(
        "fault/lost_tokens",
        "tokens",
        "response tokens of lost engines that are generated again, as far as health probes had told them",
    ),
    Metric("fault/healing_seconds", "seconds", "from the notice of an engine's loss until another serves, all engines"),
    Metric("data/epoch", "count", "epoch of the training prompts"),
    Metric("data/prompts_too_long", "count", "prompts left out because of their length, all data sets"),
    Metric("data/rows_skipped", "count", "malformed rows skipped, all data sets"),
    Metric("data/special_text_rows", "count", "rows that hold text of special tokens, which stays text"),
    Metric("eval/{dataset}/accuracy", "share", "share of held-out problems answered correctly"),
    Metric("eval/{dataset}/grading_failures_count", "count", "answers whose grading timed out or failed"),
    Metric("eval/{dataset}/reward_mean", "none", "mean score on held-out problems"),
    Metric("eval/{dataset}/response_tokens_mean", "tokens", "mean length of held-out answers"),
    Metric("eval/{dataset}/loss", "nats", "mean loss of a trained token of held-out rows (supervised runs)"),
    Metric("eval/{dataset}/pass_at_{k}", "share", "chance that one of k answers is correct (unbiased estimator)"),
    Metric("warm_start/loss", "nats", "mean token loss of the supervised phase"),
]

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}


@cache
def _pattern() -> re.Pattern[str]:
    parts = (re.sub(r"\\{\w+\\}", r"[^/]+", re.escape(name)) for name in METRICS)
    return re.compile("|".join(f"(?:{part})" for part in parts))


@cache
def declaration(name: str) -> tuple[Metric, tuple[str, ...]]:
    """What `name` is declared as, with what stands for its braces. KeyError for a name that is not."""
    if name in METRICS:
        return METRICS[name], ()
    for declared, metric in METRICS.items():
        pattern = re.sub(r"\\{\w+\\}", "([^/]+)", re.escape(declared))
        if "{" in declared and (found := re.fullmatch(pattern, name)):
            return metric, found.groups()
    raise KeyError(name)


def check_names(names: Iterable[str]) -> None:
    """Raise KeyError, naming them, if any of `names` is not declared."""
    unknown = sorted(name for name in names if not _pattern().fullmatch(name))
    if unknown:
        raise KeyError(f"metrics not declared in rlpipe/monitoring/metric_dictionary.py: {', '.join(unknown)}")


def reduce_over_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value for each metric from those of the ranks that have it. KeyError for a name that is not declared, or
    declared without a reduction."""
    values: dict[str, list[float]] = {}
    for name, value in (item for rank in ranks for item in rank.items()):
        values.setdefault(name, []).append(value)
    return {name: _REDUCTIONS[METRICS[name].reduce](found) for name, found in values.items()}


_REDUCTIONS: dict[Reduce, Callable[[Sequence[float]], float]] = {Reduce.SUM: sum, Reduce.MEAN: fmean, Reduce.MAX: max}
