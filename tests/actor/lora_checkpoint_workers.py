"""What the tests of adapters in checkpoints, as reference and in weight sync run in workers; imports Megatron."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from checkpoint_workers import SCHEDULE, SUPERVISED, my_packs, reshard, save_and_continue, two_steps
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from sent_weights import sent_as_exported, sent_tensors
from train_workers import trainer

from actor.checkpoint import Checkpointer
from actor.hf.adapter_modules import adapters
from actor.hf.adapter_weights import save_adapters
from actor.hf.export import iter_export
from actor.hf.policy_folder import save_hf
from actor.trainer import Trainer
from actor.weight_sender import WeightSender
from rlpipe.config.layout import ActorLayout
from rlpipe.shared.errors import CheckpointError
from rlpipe.shared.pack import Pack

SHARDED = {"tensor": 2, "sequence": True}
EACH = {"rank": 3, "targets": ["all-linear"], "experts": "each", "init": "gaussian"}
SHARED = EACH | {"experts": "shared"}
VOCABULARY = {"rank": 3, "targets": ["q_proj", "v_proj", "embed_tokens", "lm_head"]}


def single_process_cases(rank: int, count: int, paths: dict[str, Path], folder: Path) -> dict[str, Any]:
    return {
        "float32": save_and_continue(paths["gdn_moe"], folder / "a", 2, reference=True, lora=EACH),
        "bfloat16": save_and_continue(paths["moe"], folder / "b", 2, dtype="bfloat16", lora=SHARED),
        "dropout": save_and_continue(paths["dense"], folder / "c", 2, lora=VOCABULARY | {"dropout": 0.2}),
        "names": sorted(dist_checkpointing.load_tensors_metadata(str(next((folder / "a").glob("iteration_*"))))),
        "refused": refused(paths, folder / "a"),
        "updates": thousand_updates(paths["small"]),
        "reference": reference_log_probabilities(paths["gdn_moe"], count),
        "sent": sent_factors(paths["dense"], count, folder / "sent"),
    }


def two_process_cases(rank: int, count: int, paths: dict[str, Path], folder: Path) -> dict[str, Any]:
    return {
        "pp2": save_and_continue(
            paths["gdn_moe"], folder / "a", 2, count, parallel={"pipeline": 2}, reference=True, lora=EACH
        ),
        "tp2_sp_to_pp2": reshard(paths["gdn_moe"], folder / "b", SHARDED, {"pipeline": 2}, lora=EACH),
        "ep2_to_cp2": reshard(paths["gdn_moe"], folder / "c", {"expert": 2}, {"context": 2}, lora=EACH),
        "shared_dp2_to_tp2_sp_ep2": reshard(paths["moe"], folder / "d", {}, SHARDED | {"expert": 2}, lora=SHARED),
        "vocabulary_dp2_to_tp2": reshard(paths["dense"], folder / "e", {}, {"tensor": 2}, lora=VOCABULARY),
        "reference_pp2": reference_log_probabilities(paths["gdn_moe"], count, parallel={"pipeline": 2}),
        "sent_tp2": sent_factors(paths["dense"], count, folder / "sent_tp2", parallel={"tensor": 2}),
        "sent_pp2": sent_factors(paths["dense"], count, folder / "sent_pp2", parallel={"pipeline": 2}),
        "merged_ep2": sent_merged(paths["gdn_moe"], count, parallel={"expert": 2}),
        "dropout_tp2": whole_factors(paths["dense"], count, parallel={"tensor": 2}),
        "merged_tp2": sent_merged(paths["gdn_moe"], count, parallel=SHARDED),
    }


def sent_factors(path: Path, count: int, folder: Path, **options: Any) -> dict[str, Any]:
    """What engines get of adapters, on global rank 0: whether names and shapes are the planned ones, trained factors
    those of the file that PEFT reads, and the others of a fused projection zero."""
    lora = {"rank": 3, "targets": ["q_proj", "up_proj", "o_proj"], "init": "gaussian"}
    policy = trainer(path, count, lora=lora, **options)
    two_steps(policy)
    settings = policy.options.actor.lora
    assert settings is not None
    layout = ActorLayout.of(policy.options.actor)
    sender = WeightSender(policy.policy, policy.description, "float32", 20_000, layout)
    specs = [(spec.name, spec.shape) for bucket in sender.plans["adapters"] for spec in bucket.tensors]
    tensors = sent_tensors(sender, "adapters")
    save_adapters(policy.policy, settings, folder, "base")
    if dist.get_rank() != 0:
        return {}
    file = load_file(folder / "adapter_model.safetensors")
    others = [name for name in tensors if name not in file]
    return {
        "planned": [(name, tuple(tensor.shape)) for name, tensor in tensors.items()] == specs,
        "same": all(torch.equal(tensors[name], tensor) for name, tensor in file.items()),
        "moved": all(bool(tensor.any()) for tensor in file.values()),
        "others": sorted({name.split(".")[-3] for name in others}),
        "zero": not any(bool(tensors[name].any()) for name in others),
        "contents": list(sender.plans),
    }


def whole_factors(path: Path, count: int, **options: Any) -> list[torch.Tensor]:
    """Factors that every process has as a whole, after steps with dropout."""
    policy = trainer(path, count, lora=VOCABULARY | {"dropout": 0.3}, **options)
    two_steps(policy)
    return [getattr(lora, name) for lora in adapters(policy.policy) for name in {"a", "b"} - lora.sharded_axes.keys()]


def sent_merged(path: Path, count: int, **options: Any) -> bool:
    """Whether the processes together send what an export gives, adapters of experts merged where these are."""
    policy = trainer(path, count, lora=EACH, **options)
    two_steps(policy)
    return sent_as_exported(policy.policy, policy.description, ActorLayout.of(policy.options.actor))


def save_for_export(rank: int, count: int, path: Path, folder: Path) -> None:
    """Train under a layout, save a checkpoint, and write what the live policy and its adapters are then."""
    policy = trainer(path, count, optimizer=SCHEDULE, parallel=SHARDED | {"expert": 2}, lora=SHARED)
    two_steps(policy)
    saver = Checkpointer(policy, keep=1)
    saver.save(folder, 2, {})
    saver.finish()
    save_hf(policy.policy, policy.description, folder / "live", path)
    assert policy.options.actor.lora is not None
    save_adapters(policy.policy, policy.options.actor.lora, folder / "live_adapters", "base")


def refused(paths: dict[str, Path], folder: Path) -> list[str]:
    """What loading says where adapters differ, are not there, or belong to other weights."""
    path = next(folder.glob("iteration_*"))
    others: list[dict[str, Any]] = [{"lora": EACH | {"rank": 4}}, {}]
    found = [trainer(paths["gdn_moe"], reference=True, **other) for other in others]
    found.append(trainer(paths["other"], reference=True, lora=EACH))
    return [_error(one, path) for one in found]


def _error(loading: Trainer, path: Path) -> str:
    try:
        Checkpointer(loading, 1).load(path)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def thousand_updates(path: Path) -> dict[str, Any]:
    """Adapters move a thousand times, the merged weights are sent each time, and the adapters come back."""
    policy = trainer(path, dtype="bfloat16", lora=EACH | {"rank": 2, "experts": "none"})
    factors = [factor for lora in adapters(policy.policy) for factor in lora.parameters()]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in factors:
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
        before, base = _export(policy), _frozen(policy)
        kept = [factor.clone() for factor in factors]
        moved = 0
        for _ in range(1000):
            for factor in factors:
                factor.add_(torch.randn(factor.shape, generator=generator) * 0.01)
            sent = dict(iter_export(policy.policy, policy.description))
            moved += any(not torch.equal(tensor, before[name]) for name, tensor in sent.items())
        for factor, value in zip(factors, kept, strict=True):
            factor.copy_(value)
    return {"moved": moved, "same": _equal(_export(policy), before), "same_base": _equal(_frozen(policy), base)}


def _export(policy: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_export(policy.policy, policy.description)}


def _frozen(policy: Trainer) -> dict[str, torch.Tensor]:
    named = [item for chunk in policy.policy for item in chunk.named_parameters()]
    return {name: parameter.clone() for name, parameter in named if not parameter.requires_grad}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reference_log_probabilities(path: Path, count: int, **options: Any) -> dict[str, Any]:
    """Of trained adapters: whether the reference is the model without adapters, bit by bit, before `set_reference`, and
    the policy after it; with routes given, too."""
    plain = trainer(path, count, **options)
    packs = my_packs(plain)
    routed = [_with_routes(pack, plain) for pack in packs]
    wanted, wanted_routed = plain.logprobs(packs, "policy"), plain.logprobs(routed, "policy")
    policy = trainer(path, count, reference=True, optimizer=SCHEDULE, lora=EACH, **options)
    for _ in range(2):
        policy.train_step(packs, SUPERVISED)
    own = policy.logprobs(packs, "policy")
    found, found_routed = policy.logprobs(packs, "reference"), policy.logprobs(routed, "reference")
    policy.set_reference()
    return {
        "moved": not _same(own, wanted) or not own,
        "is_base": _same(found, wanted) and _same(found_routed, wanted_routed),
        "unharmed": _same(policy.logprobs(packs, "policy"), own),
        "follows": _same(policy.logprobs(packs, "reference"), own),
        "copied_bytes": sum(weight.nbytes for weight in policy.reference.weights) if policy.reference else 0,
        "model_bytes": sum(p.nbytes for chunk in policy.policy for p in chunk.parameters()),
    }


def _with_routes(pack: Pack, policy: Trainer) -> Pack:
    sizes = policy.description.experts
    assert sizes is not None
    generator = np.random.default_rng(2)
    tokens = (len(pack.token_ids), policy.description.layers)
    routes = generator.permuted(np.tile(np.arange(sizes.experts), (*tokens, 1)), axis=-1)[..., : sizes.top_k]
    return replace(pack, routes=routes.astype(np.int16))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
