"""Seconds of a weight update over several processes: all holders send their own tensors, beside one process that sends
everything after it was gathered there.

    python benchmarks/weight_senders.py [--layouts EP2 TP2] [--layers 12] [--rounds 5]

The actor is the mixture of configs/models/Qwen3-30B-A3B with fewer layers and random weights in bfloat16, a tiny one
where there are no GPUs; each of its processes has a GPU, as has each of two more, which receive as an engine's ranks
do: into memory of the tensors' own. Both ways take turns, and both have to bring the same bits.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from gpu_processes import start_with_gpu

from rlpipe.config.actor import ActorConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.model.description import TrainableModel
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.project_files import MODELS
from rlpipe.shared.weights import StackedExperts, TensorSpec, WeightBucket, WeightGroup, checksum

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP2": (2, {"expert": 2}),
    "TP2": (2, {"tensor": 2, "sequence": True}),
    "PP2": (2, {"pipeline": 2}),
    "TP2 EP2 PP2": (8, {"tensor": 2, "sequence": True, "expert": 2, "pipeline": 2}),
}
READERS = 2
WAYS = ONE, HOLDERS = "one sender", "all holders"
TINY = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "vocab_size": 4096}


@dataclass(frozen=True)
class Case:
    """What every process knows."""

    layout: str
    raw: dict[str, Any]
    bucket_bytes: int
    rounds: int
    port: int

    @property
    def senders(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def actor(self) -> ActorConfig:
        return ActorConfig.model_validate(
            {"processes": self.senders, "parallel": LAYOUTS[self.layout][1], "dtype": "bfloat16"}
        )

    def plan(self, way: str) -> tuple[WeightBucket, ...]:
        from actor.hf.weight_table import export_plan, weight_table
        from actor.weight_plan import Holders, buckets_of, model_sources, plan_buckets, portions_of

        model = replace(trainable_model(self.raw), fused_experts=True)
        if way == ONE:
            return plan_buckets(export_plan(model), self.bucket_bytes)
        table = weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=False)
        sources = model_sources((entry for entry in table if entry.copy_of is None), "bfloat16")
        holders = Holders(ActorLayout.of(self.actor), model.layers)
        return buckets_of(portions_of(sources, holders, self.bucket_bytes), holders, self.bucket_bytes)

    def group(self, way: str) -> WeightGroup:
        senders = tuple(sorted({bucket.sender for bucket in self.plan(way)}))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        return WeightGroup(way, ("127.0.0.1",), self.port, senders, READERS, backend, 2 * self.bucket_bytes)


def main() -> None:
    gpus = torch.cuda.device_count()
    fitting = [name for name, (processes, _) in LAYOUTS.items() if not gpus or processes + READERS <= gpus]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=fitting, choices=list(LAYOUTS), help="of the actor")
    parser.add_argument("--layers", type=int, default=12 if gpus else 4)
    parser.add_argument("--rounds", type=int, default=5 if gpus else 15, help="updates of each way that are timed")
    options = parser.parse_args()
    raw = json.loads((MODELS / "Qwen3-30B-A3B" / "config.json").read_text()) | {"num_hidden_layers": options.layers}
    for name in options.layouts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        bucket_bytes = 512 * 2**20 if gpus else 2**20
        _report(Case(name, raw if gpus else raw | TINY, bucket_bytes, options.rounds, store.port))


def _report(case: Case) -> None:
    total = sum(bucket.size_bytes for bucket in case.plan(HOLDERS))
    context = multiprocessing.get_context("spawn")
    everybody, answers = context.Barrier(case.senders + READERS), context.Queue()
    processes = [
        context.Process(target=_run, args=(case, rank, everybody, answers)) for rank in range(case.senders + READERS)
    ]
    for rank, process in enumerate(processes):
        start_with_gpu(process, rank)
    found = dict(answers.get(timeout=600) for _ in processes)
    missing = [rank for rank, answer in found.items() if answer is None]
    assert not missing, f"processes {missing} failed"
    for process in processes:
        process.join()
    print(f"actor {case.layout}, {total / 1e9:.3f} GB to {READERS} processes of engines", flush=True)
    for way in WAYS:
        seconds = [max(times) for times in zip(*(found[rank][way][0] for rank in found), strict=True)]
        most = max(sum(bucket.size_bytes for bucket in case.plan(way) if bucket.sender == rank) for rank in found)
        print(
            f"  {way:12}{median(seconds):9.4f} s ({min(seconds):.4f} to {max(seconds):.4f})"
            f"{total / median(seconds) / 1e9:9.2f} GB/s, {most / 1e9:.3f} GB from one process at most",
            flush=True,
        )
    received = {found[case.senders + reader][way][1] for reader in range(READERS) for way in WAYS}
    print("  the same bits either way" if len(received) == 1 else "  DIFFERENT BITS", flush=True)


def _run(case: Case, rank: int, everybody: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    is_sender = rank < case.senders
    try:
        own = rank if is_sender else rank - case.senders
        answers.put((rank, (_send if is_sender else _receive)(case, own, everybody)))
    except BaseException:
        answers.put((rank, None))
        everybody.abort()
        raise


def _by_turns(
    case: Case, everybody: Any, updates: Mapping[str, Callable[[], None]], after_first: Callable[[], str] = str
) -> dict[str, tuple[list[float], str]]:
    """Of each way the seconds of its updates, without the first one, which opens connections, and what `after_first`
    gives then."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found = {}
    for number in range(1 + case.rounds):
        for way in WAYS:
            everybody.wait(300)
            begin = time.perf_counter()
            updates[way]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[way] += [time.perf_counter() - begin] if number else []
            if not number:
                found[way] = after_first()
    everybody.wait(300)
    return {way: (seconds[way], found[way]) for way in WAYS}


def _send(case: Case, rank: int, everybody: Any) -> dict[str, Any]:
    from actor import distributed
    from actor.models.build_model import build_model
    from actor.runtime import install_megatron_runtime
    from actor.weight_sender import WeightSender
    from actor.weight_transport import Broadcast

    install_megatron_runtime()
    store = distributed.join_store("127.0.0.1", case.port, case.senders, 300)
    distributed.join_processes(store, rank, case.senders, 300)
    distributed.start_model_parallel(case.actor, seed=1)
    model = trainable_model(case.raw)
    chunks = build_model(model, case.actor)
    _fill(chunks)
    everybody.wait(300)
    one = Broadcast(case.group(ONE), 0, store, 300) if rank == 0 else None
    sender = WeightSender(chunks, model, "bfloat16", case.bucket_bytes, ActorLayout.of(case.actor))
    failure = sender.join([case.group(HOLDERS)], store, 300)
    assert not failure, failure
    plan, stacked = case.plan(ONE), replace(model, fused_experts=True)
    updates = {
        ONE: lambda: _send_alone(chunks, stacked, plan, one),
        HOLDERS: lambda: _check(sender.send(verify=False).failure),
    }
    found = _by_turns(case, everybody, updates)
    sender.leave()
    if one is not None:
        one.leave()
    return found


def _fill(chunks: Sequence[Any]) -> None:
    """Alike where ranks hold copies, different where they hold other experts."""
    from megatron.core import parallel_state

    named = chain.from_iterable(chunk.named_parameters() for chunk in chunks)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(named):
            torch.manual_seed(number + 10_000 * parallel_state.get_expert_model_parallel_rank() * (".experts." in name))
            parameter.normal_(std=0.02)


def _check(failure: str) -> None:
    assert not failure, failure


def _send_alone(chunks: Sequence[Any], model: TrainableModel, plan: Sequence[WeightBucket], transport: Any) -> None:
    """Every tensor is gathered on rank 0, which sends it."""
    from actor.hf.export import iter_export

    tensors = iter_export(chunks, model)
    for bucket in plan:
        flat = None if transport is None else transport.room(bucket)
        for piece in [None] * len(bucket.tensors) if flat is None else bucket.pieces(flat):
            _, tensor = next(tensors)
            if piece is not None and tensor is not None:
                piece.copy_(tensor)
        if flat is not None:
            transport.publish(flat, lambda: False)
    if transport is not None:
        transport.finish(lambda: False)


def _receive(case: Case, reader: int, everybody: Any) -> dict[str, Any]:
    from rollout.weights.sources import Broadcast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = {
        spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16, device=device)
        for bucket in case.plan(ONE)
        for spec in bucket.tensors
    }
    everybody.wait(300)
    plans = {way: case.plan(way) for way in WAYS}
    sources = {way: Broadcast(_process_groups(case.group(way), reader), device, 2 * case.bucket_bytes) for way in WAYS}
    updates = {way: partial(_load, sources[way], plans[way], kept) for way in WAYS}
    found = _by_turns(case, everybody, updates, lambda: _sums(kept))
    for source in sources.values():
        source.leave()
    return found


def _load(source: Any, plan: Sequence[WeightBucket], kept: dict[str, torch.Tensor]) -> None:
    """As an engine loads what its own loader would only copy."""
    for bucket, flat in zip(plan, source.buckets(plan), strict=True):
        torch._foreach_copy_([_place(kept, spec) for spec in bucket.tensors], bucket.pieces(flat))


def _place(kept: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    stacked = StackedExperts.of_name(spec.name)
    if stacked is None:
        return kept[spec.name]
    return kept[f"{stacked.root}.{stacked.kind}"][stacked.first :][: spec.shape[0]]


def _sums(kept: dict[str, torch.Tensor]) -> str:
    """Of all bytes, by torch, which is fast on a GPU; and set to zero, for the next way."""
    sums = torch.stack([tensor.view(torch.int16).to(torch.int64).sum() for tensor in kept.values()])
    some = torch.stack([tensor.view(torch.int16).flatten()[::7].to(torch.int64).sum() for tensor in kept.values()])
    for tensor in kept.values():
        tensor.zero_()
    return checksum(torch.cat((sums, some)).cpu().numpy().data)


def _process_groups(group: WeightGroup, reader: int) -> dict[int, Any]:
    """As SGLang joins them."""
    from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

    groups, size = {}, 1 + group.readers
    for sender in group.senders:
        name = group.name_of(sender)
        store = dist.TCPStore("127.0.0.1", group.port, is_master=False)
        made, _ = _new_process_group_helper(
            size,
            1 + reader,
            [],
            Backend(group.backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timedelta(seconds=300),
        )
        _world.pg_group_ranks[made] = {index: index for index in range(size)}
        groups[sender] = made
    return groups


if __name__ == "__main__":
    main()
