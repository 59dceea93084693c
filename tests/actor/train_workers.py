"""What the training tests run inside spawned workers (`train_support.run_processes`); imports Megatron.

Each function returns plain data; the tests assert on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from tensor_bits import bits
from torch.utils._python_dispatch import TorchDispatchMode
from train_support import make_pack

from actor import transfer_stream
from actor.distributed import start_model_parallel
from actor.hf.export import iter_export
from actor.kernel_warm_up import warm_up
from actor.megatron_patches import offloaded_adam
from actor.rank_clock import RankClock
from actor.trainer import Trainer, TrainerOptions
from rlpipe.config.actor import ActorConfig, OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig, KLConfig
from rlpipe.shared.errors import ActorError
from rlpipe.shared.pack import dummy_pack

POLICY = AlgorithmConfig(entropy_coefficient=0.01)
LENGTHS = [12, 20, 7, 16, 5, 28, 9, 30]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2)


def trainer(
    path: Path,
    count: int = 1,
    reference: bool = False,
    clock: RankClock | None = None,
    **actor: Any,
) -> Trainer:
    """A trainer in the present process group, with its own Megatron groups."""
    config = ActorConfig(processes=count, **{"dtype": "float32", "optimizer": OPTIMIZER, **actor})
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    start_model_parallel(config, seed=3)
    return Trainer(TrainerOptions(path, None, reference, config, 10), clock)


def whole_batch(multiple: int = 1):
    """One pack of every sequence; `split` cuts it without changing a token."""
    return make_pack(LENGTHS, 5, 100.0, multiple)


def split(pack, groups):
    """Packs of the sequences that `groups` names, each with the very same tokens and weights."""
    ends = pack.cu_seqlens_padded
    return [_part(pack, [(ends[index], ends[index + 1]) for index in group], group) for group in groups]


def _part(pack, spans, group):
    def take(values):
        return None if values is None else np.concatenate([values[a:b] for a, b in spans])

    real = np.diff(pack.cu_seqlens)[list(group)]
    names = ("token_ids", "targets", "position_ids", "loss_mask", "loss_weights", "advantages", "rollout_logprobs")
    arrays = {name: take(getattr(pack, name)) for name in (*names, "old_logprobs", "ref_logprobs")}
    return replace(
        pack,
        **arrays,
        sample_ids=tuple(pack.sample_ids[index] for index in group),
        cu_seqlens=(0, *np.cumsum(real).tolist()),
        cu_seqlens_padded=(0, *np.cumsum([b - a for a, b in spans]).tolist()),
    )


def poisoned(pack):
    """The same pack with an advantage that is not a number."""
    return replace(pack, advantages=pack.advantages * np.float32("nan"))


def overflowing(pack):
    """The same pack with weights so large that the loss is finite and its gradient is not."""
    signs = np.where(np.arange(len(pack.loss_mask)) % 2, 1, -1)
    return replace(pack, loss_weights=pack.loss_mask * np.float32(1e37), advantages=(pack.loss_mask * signs))


def weights(of: Trainer) -> dict[str, np.ndarray]:
    return {
        name: tensor.float().clone().numpy() for name, tensor in iter_export(of.policy, of.description, everywhere=True)
    }


@contextmanager
def streamed_states() -> Iterator[None]:
    """Trainers made in the block move optimizer states through device memory as on a GPU, also where there is none."""
    offloaded_adam.has_transfers = lambda: True
    try:
        yield
    finally:
        offloaded_adam.has_transfers = transfer_stream.has_transfers


def masters_and_moments(of: Trainer) -> list[torch.Tensor]:
    return [
        state[name].clone()
        for part in of.optimizer.megatron.chained_optimizers
        for state in part.optimizer.state.values()
        for name in ("master_param", "exp_avg", "exp_avg_sq", "step")
    ]


def step(of: Trainer, packs, algorithm: AlgorithmConfig = POLICY) -> tuple[float, float]:
    """(loss, gradient norm) of one applied step."""
    report = of.train_step(packs, algorithm)
    assert report.applied, report
    return report.metrics["train/loss"], report.metrics["train/gradient_norm"]


# ---------------------------------------------------------------- one process


def all_single_process_cases(rank: int, count: int, paths: dict[str, Path]) -> dict[str, Any]:
    cases = (
        splits_of_a_batch, skipped_steps, overflowing_gradients, too_many_skips, frozen_parameters, offload_fractions,
        moments_beside_the_hosts, weight_decay, optimizer_reset, reference_policy, kl_term, old_logprobs,
        temperature_of_the_head, half_precision_moments, two_updates_against_the_engine,
        recomputed_above_a_frozen_embedding, unusual_options, gradients_of_half_precision,
        entropy_bonus, dropout_of_adapters, mtp_losses_of_a_step, reference_of_its_own,
    )  # fmt: skip
    return {case.__name__: case(paths) for case in cases}


def splits_of_a_batch(paths):
    """Two steps on one batch, split in several ways."""
    pack = whole_batch()
    ways = [[range(8)], [range(4), range(4, 8)], [[7, 0], [3], [1, 2, 6, 5], [4]], [[index] for index in range(8)]]
    results = []
    for groups in ways:
        policy = trainer(paths["moe"])
        packs = [*split(pack, groups), dummy_pack(1)]
        results.append([*step(policy, packs), *step(policy, packs)])
    return results


def skipped_steps(paths):
    warming = OptimizerConfig(learning_rate=1e-2, warmup_steps=8)  # each applied step has another rate
    policy = trainer(paths["dense"], optimizer=warming)
    good, bad = split(whole_batch(), [range(4), range(4, 8)])
    first = step(policy, [good, bad])
    before, state = weights(policy), masters_and_moments(policy)
    report = policy.train_step([good, poisoned(bad)], POLICY)
    after, state_after = weights(policy), masters_and_moments(policy)
    counts = policy.counts
    continues = [first, step(policy, [good, bad])]
    continued = weights(policy)
    twin = trainer(paths["dense"], optimizer=warming)
    without_the_skip = [step(twin, [good, bad]), step(twin, [good, bad])]
    return {
        "report": report,
        "bad_ids": bad.sample_ids,
        "weights": (bits(before), bits(after)),
        "state": (bits(state), bits(state_after)),
        "counts": counts,
        "continues": continues,
        "without_the_skip": without_the_skip,
        "final_weights": (bits(continued), bits(weights(twin))),
    }


def overflowing_gradients(paths):
    policy = trainer(paths["dense"])
    good, bad = split(whole_batch(), [range(4), range(4, 8)])
    report = policy.train_step([good, overflowing(bad)], POLICY.model_copy(update={"entropy_coefficient": 0.0}))
    return {"report": report, "bad_ids": bad.sample_ids}


def too_many_skips(paths):
    policy = trainer(paths["dense"], max_skipped_updates=2)
    report = policy.train([[poisoned(whole_batch())]] * 4, POLICY)
    return len(report.steps), report.counts


def frozen_parameters(paths):
    policy = trainer(paths["dense"], frozen_parameters=[r"embed_tokens", r"layers\.0\."])
    before = weights(policy)
    step(policy, [whole_batch()])
    after = weights(policy)
    errors = []
    for pattern in (r"q_proj", r"no_such_name"):
        try:
            trainer(paths["dense"], frozen_parameters=[pattern])
        except ActorError as error:
            errors.append(str(error))
    return sorted(name for name in before if np.array_equal(before[name], after[name])), errors


def recomputed_above_a_frozen_embedding(paths):
    """(loss, gradient norm) of two steps with each kind of recomputation."""
    ways = [{}, {"granularity": "full"}]
    ways += [{"granularity": "selective", "modules": [name]} for name in ("core_attn", "moe")]
    frozen = [r"^(?!.*(gate|experts|norm))"]
    policies = [trainer(paths["moe"], frozen_parameters=frozen, recompute=way) for way in ways]
    return [[step(policy, [whole_batch()]) for _ in range(2)] for policy in policies]


def offload_fractions(paths):
    packs = [whole_batch()]
    results = []
    for fraction in (0.0, 0.5, 1.0):
        policy = trainer(paths["dense"], optimizer=OptimizerConfig(learning_rate=1e-2, cpu_offload_fraction=fraction))
        results.append([step(policy, packs) for _ in range(3)])
    return results


def moments_beside_the_hosts(paths):
    """For optimizers with nothing and with everything in host memory that a device works on: how many values they have,
    and how many zeros were made for moments elsewhere."""
    found = []
    for fraction in (0.0, 1.0):
        options = OptimizerConfig(cpu_offload_fraction=fraction)
        with streamed_states():
            policy = trainer(paths["dense"], optimizer=options)
            with _MadeZeros() as made:
                policy.reset_optimizer(options, total_steps=10)
        found.append((sum(one.numel() for chunk in policy.policy for one in chunk.parameters()), made.elements))
    return found


class _MadeZeros(TorchDispatchMode):
    """Counts the elements of `zeros_like` inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        found = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten.zeros_like.default:
            self.elements += found.numel()
        return found


def weight_decay(paths):
    """A step without any gradient: only the decay acts."""
    options = OptimizerConfig(learning_rate=0.5, weight_decay=0.2)
    policy = trainer(paths["dense"], optimizer=options)
    before = weights(policy)
    silent = replace(whole_batch(), loss_weights=np.zeros_like(whole_batch().loss_weights))
    step(policy, [silent])
    after = weights(policy)
    return {name: (before[name].ndim, float(np.abs(after[name] - before[name] * 0.9).max()),
                   float(np.abs(after[name] - before[name]).max())) for name in before}  # fmt: skip


def optimizer_reset(paths):
    policy = trainer(paths["dense"])
    step(policy, [whole_batch()])
    policy.reset_optimizer(OptimizerConfig(learning_rate=0.5, warmup_steps=2), 7)
    state = masters_and_moments(policy)
    exported = torch.cat([parameter.detach().flatten() for parameter in policy.policy[0].parameters()])
    masters = torch.cat([state[index] for index in range(0, len(state), 4)])
    moments = [tensor for index, tensor in enumerate(state) if index % 4]
    return {
        "counts": policy.counts,
        "rate": policy.optimizer.learning_rate,
        "moments": max(float(tensor.abs().max()) for tensor in moments),
        "masters": float((masters.sort().values - exported.sort().values).abs().max()),
    }


def reference_policy(paths):
    policy = trainer(paths["dense"], reference=True)
    pack = whole_batch()
    first = policy.logprobs([pack], "policy")[0]
    step(policy, [pack])
    before = weights(policy)
    reference = policy.logprobs([pack], "reference")[0]
    with suppress(ActorError), policy.reference.swapped_in():
        raise ActorError("in the middle of a pass")
    after = weights(policy)
    trained = policy.logprobs([pack], "policy")[0]
    policy.set_reference()
    result = {
        "start": (bits(first), bits(reference)),
        "policy_moved": float(np.abs(trained - first).max()),
        "weights": (bits(before), bits(after)),
        "new_reference": (bits(policy.logprobs([pack], "reference")[0]), bits(trained)),
        "zero_outside": float(np.abs(first[pack.loss_mask == 0]).max()),
    }
    try:
        trainer(paths["dense"]).logprobs([pack], "reference")
    except ActorError as error:
        result["error"] = str(error)
    return result


def reference_of_its_own(paths):
    """Log-probabilities of policy and reference where each has a folder, and those of either folder alone."""
    pack, alone = whole_batch(), trainer(paths["dense"])
    wanted = [one.logprobs([pack], "policy")[0] for one in (alone, trainer(paths["other"]))]
    both = Trainer(replace(alone.options, reference_path=paths["other"], keep_reference=True))
    return [bits(both.logprobs([pack], which)[0]) for which in ("policy", "reference")], list(map(bits, wanted))


def kl_term(paths):
    policy = trainer(paths["dense"], reference=True)
    options = AlgorithmConfig(kl=KLConfig(coefficient=0.3))
    pack = whole_batch()
    with_reference = replace(pack, ref_logprobs=policy.logprobs([pack], "reference")[0])
    return [policy.train_step([with_reference, dummy_pack(1)], options).metrics for _ in range(2)]


def old_logprobs(paths):
    """A step with old log-probabilities from a pass before it is the on-policy step."""
    pack = whole_batch()
    policy = trainer(paths["dense"])
    recorded = replace(pack, old_logprobs=policy.logprobs([pack], "policy")[0])
    with_old = [step(policy, [recorded]), policy.train_step([recorded], POLICY).metrics]
    return step(trainer(paths["dense"]), [pack]), *with_old


def two_updates_against_the_engine(paths):
    """Metrics of two updates in one call, for packs that the engine sampled exactly as the policy says; and of one
    after a skipped one."""
    pack = whole_batch()
    policy = trainer(paths["dense"])
    sampled = replace(pack, rollout_logprobs=policy.logprobs([pack], "policy")[0])
    algorithm = AlgorithmConfig(old_policy="rollout")
    after_a_skip = policy.train([[poisoned(sampled)], [sampled]], algorithm).steps[1]
    report = trainer(paths["dense"]).train([[sampled], [sampled]], algorithm)
    return [step.metrics for step in (*report.steps, after_a_skip)]


def temperature_of_the_head(paths):
    """The first half of a pack sampled at 0.5: log-probabilities without and with that."""
    pack = whole_batch()
    halves = np.where(np.arange(pack.padded_tokens) < pack.padded_tokens // 2, 0.5, 1.0).astype(np.float32)
    packs = [pack, replace(pack, temperatures=halves)]
    return trainer(paths["dense"]).logprobs(packs, "policy")


def half_precision_moments(paths):
    results = []
    for dtype in ("float32", "bfloat16"):
        policy = trainer(paths["dense"], optimizer=OptimizerConfig(learning_rate=1e-2, moments_dtype=dtype))
        losses = [step(policy, [whole_batch()], AlgorithmConfig(loss="sft"))[0] for _ in range(5)]
        kinds = {
            state[name].dtype
            for part in policy.optimizer.megatron.chained_optimizers
            for state in part.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        }
        results.append((losses, [str(kind) for kind in kinds]))
    return results


def unusual_options(paths):
    """Three updates with no option of Adam at its default, beside those of torch from the same gradients: how far
    the parameters of either are apart, of how far they went, and the gradient norms before clipping."""
    rate, beta1, beta2, epsilon, decay, most = 3e-3, 0.6, 0.9, 1e-4, 0.3, 0.05
    options = OptimizerConfig(
        learning_rate=rate, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay, max_gradient_norm=most
    )
    policy = trainer(paths["dense"], optimizer=options)
    ours = list(policy.policy[0].parameters())
    start = [parameter.detach().clone() for parameter in ours]
    theirs = [one.clone() for one in start]
    decayed = [{"params": [one], "weight_decay": decay * (one.ndim > 1)} for one in theirs]
    adam = torch.optim.AdamW(decayed, lr=rate, betas=(beta1, beta2), eps=epsilon)
    norms = []
    for _ in range(3):
        policy.accumulate([whole_batch()], POLICY)
        policy.optimizer.finish_gradients()
        for twin, parameter in zip(theirs, ours, strict=True):
            twin.grad = parameter.main_grad.clone()
        clipped = torch.nn.utils.clip_grad_norm_(theirs, most)
        norms.append((step(policy, [whole_batch()])[1], float(clipped)))
        adam.step()
    moved = max(float((one - before).abs().max()) for one, before in zip(ours, start, strict=True))
    return max(float((one - twin).abs().max()) for one, twin in zip(ours, theirs, strict=True)) / moved, norms


def gradients_of_half_precision(paths):
    """The data types in which gradients are added up where the parameters are in bfloat16."""
    policy = trainer(paths["dense"], dtype="bfloat16").policy[0]
    return {(str(parameter.dtype), str(parameter.main_grad.dtype)) for parameter in policy.parameters()}


def entropy_bonus(paths):
    """Metrics of updates on a pack without any advantage: the bonus alone acts."""
    pack = whole_batch()
    silent = replace(pack, advantages=np.zeros_like(pack.advantages))
    policy = trainer(paths["dense"])
    return [policy.train_step([silent], AlgorithmConfig(entropy_coefficient=0.1)).metrics for _ in range(3)]


def mtp_losses_of_a_step(paths):
    """Of a step alone, of one after a warm-up, and of one after an update whose gradient overflowed."""
    pack, plain = whole_batch(), POLICY.model_copy(update={"entropy_coefficient": 0.0})
    alone = trainer(paths["mtp"], train_mtp=True)
    found = [alone.train_step([pack], plain).metrics["train/mtp_loss"]]
    warm = trainer(paths["mtp"], train_mtp=True)
    warm_up(warm, [pack], [pack], plain, longest_sequence_tokens=30)
    found.append(warm.train_step([pack], plain).metrics["train/mtp_loss"])
    skipping = trainer(paths["mtp"], train_mtp=True)
    assert not skipping.train_step([overflowing(pack)], plain).applied
    return [*found, skipping.train_step([pack], plain).metrics["train/mtp_loss"]]


def dropout_of_adapters(paths):
    """Losses, log-probabilities of policy and reference, each twice, once adapters have moved; then two losses of the
    same weights."""
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"], "init": "gaussian", "dropout": 0.5}
    policy = trainer(paths["dense"], reference=True, lora=lora)
    losses = [step(policy, [whole_batch()], AlgorithmConfig(loss="sft"))[0] for _ in range(2)]
    policy.set_reference()
    scored = [bits(policy.logprobs([whole_batch()], which)[0]) for which in ("policy", "reference") * 2]
    passes = [policy.accumulate([whole_batch()], AlgorithmConfig(loss="sft")) for _ in range(2)]
    return losses, scored, [float(result.output.token_loss.sum()) for (result,) in passes]


# ---------------------------------------------------------------- two processes

TWO = {
    "tp2": {"tensor": 2},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
    "ep2": {"expert": 2},
}


def policy_step_in_layouts(rank: int, count: int, paths: dict[str, Path], layouts: dict[str, Any]) -> dict[str, Any]:
    """Per layout: log-probabilities, all metrics of an off-policy KL step, a skipped step, the step after it."""
    results = {}
    for name, parallel in layouts.items():
        policy = trainer(paths["moe" if "ep" in name else "dense"], count, reference=True, parallel=parallel)
        layout = policy.layout
        packs = [*split(whole_batch(4), [[0, 5], [1, 2], [3], [4, 6, 7]]), dummy_pack(layout.pack_multiple)]
        packs += [dummy_pack(layout.pack_multiple)] * (-len(packs) % layout.data_parallel)
        mine = slice(layout.place(rank).data, None, layout.data_parallel)
        options = AlgorithmConfig(kl=KLConfig(coefficient=0.3), entropy_coefficient=0.01)
        packs = [
            replace(pack, ref_logprobs=pack.rollout_logprobs, old_logprobs=pack.rollout_logprobs) for pack in packs
        ]
        bad = [poisoned(pack) if index == 1 else pack for index, pack in enumerate(packs)]
        results[name] = {
            "logprobs": policy.logprobs(packs[mine], "policy"),
            "first": policy.train_step(packs[mine], options),
            "skipped": policy.train_step(bad[mine], options),
            "second": policy.train_step(packs[mine], options),
        }
    return results


def few_packs(rank: int, count: int, path: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    """Steps of one to four packs, fewer than the interleaved schedule has virtual stages: (loss, norm) of each on the
    last stage, {} elsewhere; and who is named where a gradient overflows."""
    policy = trainer(path, count, parallel=parallel)
    packs = split(whole_batch(), [[0, 5], [1, 2], [3], [4, 6, 7]])
    found: dict[str, Any] = {}
    for several in (1, 2, 3, 4):
        scored = policy.logprobs(packs[:several], "policy")
        metrics = policy.train_step(packs[:several], POLICY).metrics
        found[f"{several}"] = [metrics.get("train/loss"), metrics["train/gradient_norm"], *map(np.sum, scored)]
    report = policy.train_step([overflowing(packs[0])], POLICY.model_copy(update={"entropy_coefficient": 0.0}))
    return found | {"culprits": report.culprit_sample_ids}
