"""What the checkpoint tests run inside spawned workers; imports Megatron."""

import random
import resource
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from tensor_bits import bits
from train_workers import masters_and_moments, overflowing, split, streamed_states, trainer, weights, whole_batch

from actor.checkpoint import Checkpointer, sharding_metadata, trained_content
from actor.hf.policy_folder import save_hf
from actor.optimizer_content import optimizer_content
from actor.trainer import Trainer
from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.checkpoint_folder import checkpoint_path, complete_checkpoints, partial_path
from rlpipe.shared.collection import collect_everything
from rlpipe.shared.errors import CheckpointError

SUPERVISED = AlgorithmConfig(loss="sft")
NO_EXPERT = r"^(?!.*\.mlp\.experts\.)"
FIRST_LAYER = {"rank": 2, "targets": ["layers.0.self_attn.q_proj"]}
FIRST_HALF = r"embed_tokens|layers\.[01]\."
SCHEDULE = OptimizerConfig(learning_rate=1e-2, schedule="linear", warmup_steps=1, decay_steps=9, weight_decay=0.1)


def all_single_process_cases(
    rank: int, count: int, paths: dict[str, Path], folder: Path, chosen: set[str]
) -> dict[str, Any]:
    """Of those that continue, the chosen ones."""
    dense, half = paths["dense"], SCHEDULE.model_copy(update={"moments_dtype": "bfloat16"})
    offload = SCHEDULE.model_copy(update={"cpu_offload_fraction": 0.5})
    continued: dict[str, tuple[Path, int, dict[str, Any]]] = {
        "streamed": (paths["moe"], 2, {"dtype": "bfloat16", "optimizer": half}),
        "float32": (dense, 2, {"reference": True}),
        "bfloat16": (paths["moe"], 2, {"dtype": "bfloat16", "optimizer": half}),
        "frozen": (dense, 2, {"frozen_parameters": ["embed_tokens"], "reference": True}),
        "first": (dense, 0, {"optimizer": offload}),
        "dense_hybrid": (paths["gdn"], 2, {"reference": True}),
        "only_experts": (paths["moe"], 2, {"frozen_parameters": [NO_EXPERT]}),
    }
    found = {}
    for name in sorted(chosen & continued.keys()):
        path, steps_before, options = continued[name]
        with streamed_states() if name == "streamed" else nullcontext():
            found[name] = save_and_continue(path, folder / name, steps_before, **options)
    return found | {
        "damaged": damaged_checkpoints(paths, folder / "damaged"),
        "full_disk": full_disk(dense, folder / "full_disk"),
        "in_slots": save_of_what_slots_hold(dense, folder / "in_slots"),
        "in_a_row": saves_in_a_row(dense, folder / "in_a_row"),
    }


def all_two_process_cases(
    rank: int, count: int, paths: dict[str, Path], folder: Path, chosen: set[str]
) -> dict[str, Any]:
    """Of those that continue or load under another layout, the chosen ones."""
    in_turns = {"pipeline": 2, "virtual_pipeline": 2}
    continued: dict[str, tuple[Path, dict[str, Any]]] = {
        "dp2_moe_ep2": (paths["moe"], {"parallel": {"expert": 2}}),
        "pp2_vpp2": (paths["dense"], {"parallel": in_turns, "reference": True}),
        "pp2_adapters_of_one_stage": (
            paths["dense"],
            {"parallel": {"pipeline": 2}, "lora": FIRST_LAYER, "reference": True},
        ),
        "pp2_frozen_stage": (paths["dense"], {"parallel": {"pipeline": 2}, "frozen_parameters": [FIRST_HALF]}),
        "dp2_one_norm": (paths["dense"], {"frozen_parameters": [r"^(?!model\.norm)"]}),
        "pp2_vpp2_few_experts": (paths["few_experts"], {"parallel": in_turns}),
    }
    only_experts = {"frozen_parameters": [NO_EXPERT]}
    resharded: dict[str, tuple[Path, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "dense_hybrid_pp2_to_tp2": (paths["gdn"], {"pipeline": 2}, {"tensor": 2}, {}),
        "only_experts_ep2_to_pp2": (paths["moe"], {"expert": 2}, {"pipeline": 2}, only_experts),
        "dp2_to_tp2_sp": (paths["uneven"], {}, {"tensor": 2, "sequence": True}, {}),
        "tp2_to_pp2": (paths["dense"], {"tensor": 2}, {"pipeline": 2}, {}),
        "moe_ep2_to_dp2": (paths["moe"], {"expert": 2}, {}, {}),
        "moe_dp2_to_cp2": (paths["uneven_moe"], {}, {"context": 2}, {}),
    }
    found: dict[str, Any] = {}
    for name in sorted(chosen & continued.keys()):  # by all ranks in one order
        path, options = continued[name]
        found[name] = save_and_continue(path, folder / name, 2, count, **options)
    for name in sorted(chosen & resharded.keys()):
        path, before, after, options = resharded[name]
        found[name] = reshard(path, folder / name, before, after, **options)
    return found | {
        "one_damaged_file": one_damaged_file(rank, paths["dense"], folder / "one_damaged_file"),
        "uneven": [len(rows_in_parts(trainer(paths[name], 2))) for name in ("uneven", "uneven_moe")],
    }


def save_for_export(rank: int, count: int, cases: dict[str, tuple[Path, dict[str, Any]]], folder: Path) -> None:
    """For each case train under its layout, save a checkpoint, and write what the live policy is then."""
    for name, (path, options) in cases.items():
        policy = trainer(path, count, optimizer=SCHEDULE, **options)
        two_steps(policy)
        saver = Checkpointer(policy, keep=1)
        saver.save(folder / name, 2, {})
        saver.finish()
        save_hf(policy.policy, policy.description, folder / name / "live", path)


def my_packs(policy: Trainer):
    packs = split(whole_batch(4), [[0, 5], [1, 2], [3], [4, 6, 7]])
    return packs[policy.layout.place(dist.get_rank()).data :: policy.layout.data_parallel]


def two_steps(policy: Trainer) -> list[Any]:
    return [policy.train_step(my_packs(policy), SUPERVISED).metrics for _ in range(2)]


def save_and_continue(path: Path, folder: Path, steps_before: int, count: int = 1, **options: Any) -> dict[str, Any]:
    """Some steps and a skipped one, a save in the background of two more; a fresh trainer loads it and makes these."""
    options = {"optimizer": SCHEDULE, **options}
    policy = trainer(path, count, **options)
    if steps_before:
        two_steps(policy)
        assert not policy.train_step([overflowing(pack) for pack in my_packs(policy)], SUPERVISED).applied
    saver = Checkpointer(policy, keep=2)
    seed_generators(dist.get_rank())
    final = saver.save(folder, 2, {"position": [1, 2, 3]})
    appeared_early = final.exists()
    drawn = random_numbers()
    metrics = two_steps(policy)
    saver.finish()
    expected = weights(policy)

    twin = trainer(path, count, **options)
    two_steps(twin)  # the load must replace everything that this changes
    if twin.reference:
        twin.set_reference()
    driver_state = Checkpointer(twin, keep=2).load(final)
    drawn_again = random_numbers()
    resumed = two_steps(twin)
    found = weights(twin)
    return {
        "appeared_early": appeared_early,
        "driver_state": driver_state,
        "drawn": (drawn, drawn_again),
        "metrics": (resumed, metrics),
        "weights": (bits(found), bits(expected)),
        "reference": (_reference_bits(twin), _reference_bits(policy)),
        "counts": (twin.counts, policy.counts),
        "files": sorted(file.name for file in final.iterdir()),
    }


def memory_of_a_save(rank: int, count: int, path: Path, folder: Path, **options: Any) -> dict[str, int]:
    """Most bytes that this process has beyond what it had before, while it saves and while it loads; and those of its
    optimizer's states."""
    policy = trainer(path, count, dtype="bfloat16", optimizer=SCHEDULE, **options)
    saver = Checkpointer(policy, keep=1)
    states = sum(tensor.nbytes for tensor in masters_and_moments(policy))

    def save(name: str) -> None:
        saver.save(folder / name, 1, {})
        saver.finish()

    def load() -> None:
        saver.load(checkpoint_path(folder / "first", 1))

    save("first")  # what it imports and opens stays
    load()
    return {"saving": _more_memory(lambda: save("second")), "loading": _more_memory(load), "states": states}


def _more_memory(work: Callable[[], None]) -> int:
    collect_everything()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def write_under_way(rank: int, count: int, path: Path, folder: Path) -> dict[str, Any]:
    """An update that comes while the writer still stands before its first file waits, and changes nothing of it."""
    policy = trainer(path, count, optimizer=SCHEDULE)
    two_steps(policy)
    expected = masters_and_moments(policy)
    saver = Checkpointer(policy, keep=1)
    go, order = threading.Event(), []
    saver._writer.waiting.submit(go.wait)
    final = saver.save(folder, 2, {})
    threading.Timer(1.0, lambda: (order.append("written"), go.set())).start()
    policy.train_step(my_packs(policy), SUPERVISED)
    order.append("updated")
    saver.finish()
    threads = sum(thread.name.startswith("checkpoint-writer") for thread in threading.enumerate())
    files = len(list(final.glob("*.distcp")))
    twin = trainer(path, count, optimizer=SCHEDULE)
    Checkpointer(twin, keep=1).load(final)
    states = bits(masters_and_moments(twin)), bits(expected)
    return {"order": order, "states": states, "threads": threads, "files": files}


def write_beside_a_reference_pass(rank: int, count: int, path: Path, folder: Path) -> tuple[str, str]:
    """All is written while the reference's weights stand in the policy's place, whose masters are its weights."""
    on_device = SCHEDULE.model_copy(update={"cpu_offload_fraction": 0.0})
    policy = trainer(path, count, optimizer=on_device, reference=True)
    two_steps(policy)
    expected = masters_and_moments(policy)
    saver = Checkpointer(policy, keep=1)
    go = threading.Event()
    saver._writer.waiting.submit(go.wait)
    final = saver.save(folder, 2, {})
    with policy.reference.swapped_in():
        go.set()
        saver.finish()
    twin = trainer(path, count, optimizer=on_device, reference=True)
    Checkpointer(twin, keep=1).load(final)
    return bits(masters_and_moments(twin)), bits(expected)


def save_of_what_slots_hold(path: Path, folder: Path) -> tuple[Any, Any]:
    """Of states that an update left on the device: those of the checkpoint, and those of the update."""
    with streamed_states():
        policy = trainer(path, optimizer=SCHEDULE)
    policy.memory.states_that_stay = lambda optimizer: [99] * len(optimizer.streamed)
    two_steps(policy)
    saver = Checkpointer(policy, keep=1)
    final = saver.save(folder, 2, {})
    saver.finish()
    policy.optimizer.finish()
    twin = trainer(path, optimizer=SCHEDULE)
    Checkpointer(twin, keep=1).load(final)
    return bits(masters_and_moments(twin)), bits(masters_and_moments(policy))


def saves_in_a_row(path: Path, folder: Path) -> list[str]:
    """Checkpoints of two saves, of which nobody waits for the first."""
    saver = Checkpointer(trainer(path), keep=2)
    saver.save(folder, 1, {})
    saver.save(folder, 2, {})
    saver.finish()
    return [path.name for path in complete_checkpoints(folder)]


def seed_generators(rank: int) -> None:
    """Each process draws numbers of its own."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def reshard(path: Path, folder: Path, saved: dict[str, Any], loaded: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Save under one layout, load under another: metrics of two more steps under both."""
    policy = trainer(path, 2, optimizer=SCHEDULE, parallel=saved, **options)
    two_steps(policy)
    saver = Checkpointer(policy, keep=9)
    final = saver.save(folder, 2, {})
    saver.finish()
    expected = two_steps(policy)
    other = trainer(path, 2, optimizer=SCHEDULE, parallel=loaded, **options)
    Checkpointer(other, keep=9).load(final)
    return expected, two_steps(other)


def rows_in_parts(policy: Trainer) -> list[ShardedTensor]:
    """Shards of this rank that are a part of a row of their tensor, the rest of which another rank has."""
    models = {"model": trained_content(policy.policy[0], sharding_metadata())}
    shards = optimizer_content(policy.optimizer.megatron, models)
    return [shard for shard in shards if len(shard.global_shape) > 1 and shard.local_shape[-1] < shard.global_shape[-1]]


def damaged_checkpoints(paths: dict[str, Path], folder: Path) -> dict[str, Any]:
    """What loading says about each kind of damage; whether retention and unfinished saves behave."""
    policy = trainer(paths["dense"], optimizer=SCHEDULE)
    saver = Checkpointer(policy, keep=2)
    kept = []
    for iteration in (1, 2, 3):
        saver.save(folder, iteration, {})
        saver.finish()
        kept.append([path.name for path in complete_checkpoints(folder)])
    abandoned = partial_path(checkpoint_path(folder, 4))
    abandoned.mkdir()
    (abandoned / "__0_0.distcp").write_bytes(b"half")
    result: dict[str, Any] = {"kept": kept, "with_abandoned": [path.name for path in complete_checkpoints(folder)]}
    final = checkpoint_path(folder, 3)
    result["other_model"] = _error(Checkpointer(trainer(paths["moe"]), 1), final)
    result["other_frozen"] = _error(Checkpointer(trainer(paths["dense"], frozen_parameters=["embed"]), 1), final)
    result["other_dtype"] = _error(Checkpointer(trainer(paths["dense"], dtype="bfloat16"), 1), final)
    result["other_reference"] = _error(Checkpointer(trainer(paths["dense"], reference=True), 1), final)
    loader = Checkpointer(trainer(paths["dense"], optimizer=SCHEDULE), 1)
    result["missing"] = _error(loader, folder / "iteration_00000009")
    result["unfinished"] = _error(loader, abandoned)
    metadata = final / "metadata.json"
    plain = metadata.read_bytes()
    flips = [plain[:at] + bytes([plain[at] ^ 1 << bit]) + plain[at + 1 :] for at in range(2, 40, 5) for bit in (0, 5)]
    result["flipped"] = [_error(loader, final) for flipped in flips if metadata.write_bytes(flipped)]
    metadata.write_bytes(plain)
    shard = next(file for file in sorted(final.glob("*.distcp")) if file.stat().st_size > 1000)
    good = shard.read_bytes()
    shard.write_bytes(good[: len(good) // 2])
    result["cut"] = _error(loader, final)
    shard.write_bytes(bytes(len(good)))
    result["overwritten"] = _error(loader, final)
    shard.unlink()
    result["file_gone"] = _error(loader, final)
    shard.write_bytes(good)
    (final / "state.json").write_text("{")
    result["state"] = _error(loader, final)
    return result


def full_disk(path: Path, folder: Path) -> dict[str, Any]:
    """Saves that the kernel stops, by a limit of file sizes, in each kind of file; then one without a limit."""
    saver = Checkpointer(trainer(path), keep=1)
    old = saver.save(folder, 1, {})
    saver.finish()
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors, left = [], []
    for limit in sorted({0, *(len(content) - 1 for content in before.values())}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            saver.save(folder, 2, {})
            saver.finish()
            errors.append("saved")
        except CheckpointError as raised:
            errors.append(str(raised))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        left.append(sorted(file.name for file in folder.iterdir()))
    whole = before == {file.name: file.read_bytes() for file in old.iterdir()}
    saver.load(old)
    new = saver.save(folder, 2, {"after": "space was freed"})
    saver.finish()
    return {
        "errors": errors,
        "left": left,
        "old_is_whole": whole,
        "loaded": saver.load(new),
        "complete": [path.name for path in complete_checkpoints(folder)],
    }


def one_damaged_file(rank: int, path: Path, folder: Path) -> dict[str, Any]:
    """Every process raises for a file that only one of them looks at, and nothing was loaded."""
    policy = trainer(path, 2, optimizer=SCHEDULE)
    saver = Checkpointer(policy, keep=2)
    final = saver.save(folder, 1, {})
    saver.finish()
    two_steps(policy)
    before = weights(policy)
    files = sorted(file for file in final.iterdir() if file.name != "state.json")
    errors = []
    for file in files:
        dist.barrier()
        good = file.read_bytes()
        dist.barrier()
        if rank == 0:
            file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        dist.barrier()
        errors.append((file.name, _error(saver, final)))
        dist.barrier()
        if rank == 0:
            file.write_bytes(good)
    dist.barrier()
    untouched = (bits(weights(policy)), bits(before))
    return {"errors": errors, "weights": untouched, "afterwards": _error(saver, final)}


def _reference_bits(policy: Trainer) -> list[bytes]:
    return bits(policy.reference.weights) if policy.reference else []


def _error(loader: Checkpointer, path: Path) -> str:
    try:
        loader.load(path)
    except CheckpointError as error:
        return str(error)
    return "loaded"
