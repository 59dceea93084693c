"""What splitting the actor's layers over GPUs costs: forward and backward passes over one pack in several layouts.

    python benchmarks/split_layers.py [--layouts 1 EP2 CP2 TP2 "TP2 CP2 EP4"] [--layers 4] [--packs 2x8448] [--profile]

The first layers of Qwen3.5-35B-A3B's shape in bfloat16, without head, loss and optimizer; tiny ones in float32 where
there are no GPUs. Every GPU has as many tokens in every layout: a pack is made of CP times the sequences, and every
data rank has one. Seconds of a pass are the mean, of the slowest process. `launched` is when the host has given the
device all its work: a host that takes as long as the pass is what the device waits for. `exchanges` is what a training
run tells as such: the device's time in them, waiting for other processes included. `kernels` is the time in which any
kernel runs that is no exchange.
"""

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.multiprocessing as multiprocessing
from gpu_processes import start_with_gpu
from kernel_groups import print_groups, profiled
from layer_passes import lengths_of, policy_layers
from layer_shapes import hybrid_config, random_pack

from actor.collectives.exchange_timer import ExchangeTimer
from actor.collectives.interception import listen
from actor.device import compute_device, synchronize
from actor.distributed import join_processes, join_store, leave, open_store, start_model_parallel
from actor.layers.packed import PackInputs, pack_to_device
from actor.models.policy_model import PolicyModel
from actor.rank_clock import RankClock
from actor.runtime import install_megatron_runtime
from rlpipe.config.actor import ActorConfig
from rlpipe.flops import Part, model_flops
from rlpipe.jit_monitor import JitMonitor
from rlpipe.model.model_reader import describe_model

_KINDS = {"TP": "tensor", "CP": "context", "EP": "expert"}
_VOCABULARY = 1024  # only embeddings depend on it
_TINY_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # which four ranks can share
_PASSES = ("forward", "backward")
_LIMIT_SECONDS = 600
_FORM = "{:14}{:>6}{:>10}" + "{:>10}" * 9


@dataclass(frozen=True)
class Case:
    """What every process of a layout knows. lengths: of the sequences of one context rank's share of a pack."""

    layout: str
    layers: int
    lengths: tuple[int, ...]
    rounds: int
    profile: bool

    @property
    def parallel(self) -> dict[str, Any]:
        sizes = {_KINDS[kind]: int(size) for kind, size in re.findall(r"(TP|CP|EP)(\d+)", self.layout)}
        return sizes | {"sequence": sizes.get("tensor", 1) > 1}

    @property
    def processes(self) -> int:
        sizes = self.parallel
        return int(max(sizes.get("tensor", 1) * sizes.get("context", 1), sizes.get("expert", 1)))

    @property
    def pack_lengths(self) -> tuple[int, ...]:
        return self.lengths * int(self.parallel.get("context", 1))

    @property
    def config(self) -> dict[str, Any]:
        here = torch.cuda.is_available()
        return hybrid_config(self.layers, _VOCABULARY, tiny=not here) | ({} if here else _TINY_HEADS)

    def teraflops_of_a_process(self) -> float:
        """Of forward and backward passes over one pack."""
        work = model_flops(describe_model(self.config).shape, self.pack_lengths)
        flops = 3 * sum(part.forward for name, part in work.parts if name is not Part.HEAD)
        return flops / int(self.parallel.get("tensor", 1) * self.parallel.get("context", 1)) / 1e12


@dataclass(frozen=True)
class Measured:
    """Seconds of one process by pass: whole, launched, in exchanges, in kernels that are none."""

    whole: dict[str, float]
    launched: dict[str, float]
    exchanges: dict[str, float]
    kernels: dict[str, float]


def main() -> None:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["1", "EP2", "CP2", "TP2"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--packs", default="2x8448" if gpus else "2x64", help="sequences x tokens of a context rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="of process 0, time by kind of kernel")
    options = parser.parse_args()
    print(f"{options.layers} layers; milliseconds of a forward and of a backward pass")
    pairs = [f"{name} {side}" for name in ("pass", "launched", "exch.", "kernels") for side in ("f", "b")]
    print(_FORM.format("layout", "GPUs", "tokens", *pairs, "TFLOP/s"), flush=True)
    for lengths in lengths_of(options.packs):
        for layout in options.layouts:
            report(Case(layout, options.layers, lengths, options.rounds, options.profile))


def report(case: Case) -> None:
    """A row of the table, in processes of its own."""
    context = multiprocessing.get_context("spawn")
    ports, answers = context.Queue(), context.Queue()
    processes = [context.Process(target=_run, args=(case, rank, ports, answers)) for rank in range(case.processes)]
    for rank, process in enumerate(processes):
        start_with_gpu(process, rank)
    found: list[Measured | None] = [answers.get(timeout=_LIMIT_SECONDS) for _ in processes]
    for process in processes:
        process.join()
    measured = [one for one in found if one is not None]
    assert len(measured) == len(found), f"{len(found) - len(measured)} processes of {case.layout} failed"
    cells = [
        f"{max(getattr(one, kind)[side] for one in measured) * 1e3:.1f}"
        for kind in ("whole", "launched", "exchanges", "kernels")
        for side in _PASSES
    ]
    teraflops = case.teraflops_of_a_process() / max(sum(one.whole.values()) for one in measured)
    print(_FORM.format(case.layout, case.processes, f"{sum(case.lengths):,}", *cells, f"{teraflops:.1f}"), flush=True)


def _run(case: Case, rank: int, ports: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    measured = None
    try:
        measured = _measure(case, rank, ports)
    finally:
        answers.put(measured)


def _measure(case: Case, rank: int, ports: Any) -> Measured:
    JitMonitor.install()
    install_megatron_runtime()
    if rank == 0:
        store = open_store("127.0.0.1", case.processes, _LIMIT_SECONDS)
        for _ in range(case.processes - 1):
            ports.put(store.port)
    else:
        store = join_store("127.0.0.1", ports.get(timeout=_LIMIT_SECONDS), case.processes, _LIMIT_SECONDS)
    join_processes(store, rank, case.processes, _LIMIT_SECONDS)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    actor = ActorConfig.model_validate(
        {"processes": case.processes, "parallel": case.parallel, "dtype": dtype, "gdn_backend": "auto", "threads": 1}
    )
    start_model_parallel(actor, seed=0)
    policy = policy_layers(case.config, actor)
    inputs = pack_to_device(random_pack(case.pack_lengths, _VOCABULARY), compute_device())
    clock = RankClock()
    stop = listen(ExchangeTimer(clock))
    for _ in range(2):
        _passes(policy, inputs, clock)
    clock.take()
    rounds = [_passes(policy, inputs, clock) for _ in range(case.rounds)]
    parts, _ = clock.take()
    stop()
    kernels = _kernel_seconds(policy, inputs, case.profile and rank == 0)
    measured = Measured(
        whole=_means([whole for whole, _ in rounds]),
        launched=_means([launched for _, launched in rounds]),
        exchanges={side: parts.get(f"{side}_exchange", 0.0) / case.rounds for side in _PASSES},
        kernels=kernels,
    )
    leave()
    return measured


def _means(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {side: fmean(one[side] for one in rounds) for side in _PASSES}


def _passes(policy: PolicyModel, inputs: PackInputs, clock: RankClock) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each pass, and until its last kernel was launched."""
    for parameter in policy.parameters():
        parameter.grad = None
    whole, launched = {}, {}
    hidden: Any = None
    for side in _PASSES:
        synchronize()
        begin = time.perf_counter()
        with clock.part(side):
            if side == "forward":
                hidden = policy(inputs)
                gradient = torch.ones_like(hidden)
            else:
                hidden.backward(gradient)
        launched[side] = time.perf_counter() - begin
        synchronize()
        whole[side] = time.perf_counter() - begin
    return whole, launched


def _kernel_seconds(policy: PolicyModel, inputs: PackInputs, shown: bool) -> dict[str, float]:
    """With the profiler on, which slows the host but no kernel."""
    hidden: list[Any] = []
    seconds = {}
    for side in _PASSES:

        def call(side: str = side) -> None:
            if side == "forward":
                hidden.append(policy(inputs))
            else:
                hidden[0].backward(torch.ones_like(hidden[0]))
            synchronize()

        profile = profiled(call)
        seconds[side] = profile.busy_seconds
        if shown:
            print(side)
            print_groups(profile.times)
    return seconds


if __name__ == "__main__":
    main()
