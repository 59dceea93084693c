"""The driver's own work at 4,096 GPUs: requests, groups, samples, metrics, advantages, packs, placement, weight plan.

    python benchmarks/driver_scale.py [--samples 65536 262144 1048576] [--response-tokens 32]

Everything the driver does is real. What it talks to is not: engines are stand-ins that answer at once with responses
made before, both ways by Ray's pickler, graders are left out, a buffer of this process stands for Ray's store, and GPUs
are logical resources of a local Ray cluster. So the seconds are those in which the driver is busy: those of the rollout
pass beside the engines' own, those of metrics beside the actor's, for the others GPUs wait. Each size runs in a process
of its own.

"us a sample" has to stay the same as samples grow. A response here is short, so that a million of them fit into memory;
what each further token of it costs tells what responses as long as the recipe allows cost, beside the seconds that
`rlpipe plan` gives an iteration of Qwen3.5-35B-A3B with that many of them on 4,096 H200.
"""

import argparse
import asyncio
import json
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray.cloudpickle as cloudpickle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actor.hf.weight_table import export_plan
from actor.weight_plan import plan_buckets
from rlpipe.algorithms import compute_advantages
from rlpipe.batching import PackLimits, advise_budget, pack_for_training
from rlpipe.batching.pack_plan import flops_cost
from rlpipe.commands.clusters import load_cluster
from rlpipe.commands.environment import set_defaults
from rlpipe.config.layout import ActorLayout
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.estimate.run_estimate import plan
from rlpipe.generation.episode_makers import ConversationMaker
from rlpipe.generation.generate_functions import single_turn
from rlpipe.generation.group_source import GroupSource
from rlpipe.generation.prompt_requests import PromptRequest, requests_for_prompt
from rlpipe.model.config_file import read_config
from rlpipe.model.model_reader import trainable_model
from rlpipe.monitoring.transcripts import transcripts
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.collection import collection_paused
from rlpipe.shared.number_arrays import Logprobs, TokenIds
from rlpipe.shared.pack import PackFrame
from rlpipe.shared.sample import Episode, Prompt, Reward, Status, VersionSpan
from rlpipe.shared.sample_table import SampleTable
from rlpipe.training.placement import placements
from rlpipe.training.ray_cluster import ray_cluster
from rlpipe.training.summaries import rollout_metrics
from rlpipe.training.trained_share import planned_model
from rollout.client import EngineClient
from rollout.fleet import EngineState, Fleet, RunningEngine
from rollout.requests import GenerateRequest, Generation, SamplingParameters

GPUS, NODE_GPUS, GROUP, AT_ONCE = 4096, 8, 8, 8
RECIPE = "configs/recipes/qwen3_5_35b_a3b_dapo.yaml"
_SPLIT = {
    "parallel.tensor": 2,
    "parallel.sequence": "true",
    "parallel.context": 4,
    "recompute.granularity": "full",
    "max_tokens_per_gpu": 8448,
}
PARTS = ("rollout", "metrics", "advantage", "pack", "send")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[65_536, 262_144, 1_048_576])
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--without-cluster", action="store_true", help="leave out the placement, which starts Ray")
    parser.add_argument("--once", action="store_true", help="one size, in this process, as JSON")
    options = parser.parse_args()
    if options.once:
        set_defaults()
        print(json.dumps(iteration(options.samples[0], options.response_tokens)))
        return
    print(f"{GPUS:,} GPUs, {GPUS // NODE_GPUS} engines, groups of {GROUP}, {options.response_tokens} tokens a response")
    measured = [apart(samples, options.response_tokens) for samples in options.samples]
    for samples, one in zip(options.samples, measured, strict=True):
        print(line(samples, one), flush=True)
    growth = total(measured[-1]) / options.samples[-1] / (total(measured[0]) / options.samples[0])
    print(f"from the first size to the last the time of a sample grows {growth:.2f} x")
    further = further_tokens(options.samples[0] // 8, options.response_tokens)
    parts = ", ".join(f"{name} {1e9 * seconds:.2f}" for name, seconds in further.items())
    print(f"each further token of a response: {parts} ns")
    for samples, one in zip(options.samples, measured, strict=True):
        print(beside_a_step(samples, one, further, options.response_tokens))
    for name, seconds in weight_plan() if options.without_cluster else [*weight_plan(), *placement()]:
        print(f"{name}: {seconds:.2f} s")


def further_tokens(samples: int, response_tokens: int) -> dict[str, float]:
    """Seconds of each token of a response beyond `response_tokens`, up to those that the recipe allows."""
    limit = recipe(samples).rollout.max_response_tokens
    short, long = apart(samples, response_tokens), apart(samples, limit)
    return {name: max(0.0, long[name] - short[name]) / samples / (limit - response_tokens) for name in PARTS}


def apart(samples: int, response_tokens: int) -> dict[str, float]:
    """`iteration` in a process of its own, whose memory is as it was for the others."""
    arguments = ["--once", "--samples", str(samples), "--response-tokens", str(response_tokens)]
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def total(one: dict[str, float]) -> float:
    return sum(one[name] for name in PARTS)


def line(samples: int, one: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {one[name]:.2f} s" for name in PARTS)
    return (
        f"{samples:9,} samples  {parts}: {total(one):.1f} s, {1e6 * total(one) / samples:.1f} us a sample, "
        f"{one['metrics_bytes'] / samples:.1f} bytes of metrics; a look at the progress {1e3 * one['look']:.2f} ms"
    )


def beside_a_step(samples: int, one: dict[str, float], further: dict[str, float], response_tokens: int) -> str:
    """The same for responses at the recipe's limit, of which `further` says what each token more costs."""
    limit, step = recipe(samples).rollout.max_response_tokens, planned_step(samples)
    tokens = samples * (limit - response_tokens)
    busy = {name: one[name] + further[name] * tokens for name in PARTS}
    rest = total(busy) - busy["rollout"] - busy["metrics"]
    return (
        f"{samples:9,} samples of {limit:,} tokens, a step of {step:.0f} s: beside the engines {busy['rollout']:.0f} s "
        f"({busy['rollout'] / step:.1%}), beside the actor {busy['metrics']:.0f} s ({busy['metrics'] / step:.1%}), "
        f"between them {rest:.1f} s ({rest / step:.1%})"
    )


def iteration(samples: int, response_tokens: int) -> dict[str, float]:
    """Seconds of each part of the driver's work, and the bytes at the peak of computing metrics."""
    config = recipe(samples, [f"rollout.max_response_tokens={response_tokens}"])
    layout, limits = ActorLayout.of(config.actor), PackLimits.training(config.actor)
    answers = [cloudpickle.dumps(response(place, response_tokens)) for place in range(AT_ONCE)]
    clock = Clock()
    batch, clock.seconds["look"] = asyncio.run(generated(config, samples, answers))
    clock.lap("rollout")
    with collection_paused():
        result = compute_advantages(batch, config.algorithm, max_response_tokens=response_tokens)
        clock.lap("advantage")
        packs = pack_for_training(
            result.samples,
            limits,
            data_parallel=layout.data_parallel,
            aggregation=config.algorithm.aggregation,
            norm_tokens=response_tokens,
            cost=flops_cost(config.model.path),
        )
        clock.lap("pack")
        layout.check_packs([packs for (packs,) in packs.ranks], "train")
        assert all(map(store, packs.ranks))
        clock.lap("send")
    rollout_metrics(batch, 1)
    advise_budget(packs.step_lengths_tokens, limits, data_parallel=layout.data_parallel)
    transcripts(result.samples, 1, str)
    clock.lap("metrics")
    tracemalloc.start()
    rollout_metrics(batch, 1)
    return {**clock.seconds, "metrics_bytes": float(tracemalloc.get_traced_memory()[1])}


def store(rank: Sequence[Sequence[PackFrame]], into: bytearray = bytearray()) -> int:
    """The bytes that Ray's store takes of a data-parallel rank's packs: what its pickler makes of them and, copied
    into memory that is there, their arrays."""
    arrays: list[pickle.PickleBuffer] = []
    size = len(cloudpickle.dumps(rank, protocol=5, buffer_callback=arrays.append))
    for array in arrays:
        content = array.raw()
        if len(into) < content.nbytes:
            into.extend(bytes(content.nbytes - len(into)))
        memoryview(into)[: content.nbytes] = content
        size += content.nbytes
    return size


class Clock:
    """Seconds of parts that follow each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.process_time()

    def lap(self, name: str) -> None:
        """What has passed since the last call was `name`."""
        now = time.process_time()
        self.seconds[name], self._begin = now - self._begin, now


async def generated(config: Config, samples: int, answers: Sequence[bytes]) -> tuple[SampleTable, float]:
    """A batch as the driver makes it, and the seconds of a look at its progress when most of it is there."""
    engines = [stand_in_engine(index, answers) for index in range(config.rollout.engines)]
    fleet = Fleet(engines, config.fault, lambda _engine, failure, _why: failure)
    client = EngineClient(fleet, int(1.25 * config.rollout.engine.max_running_requests) + 1, keep_tokens=False)
    maker = ConversationMaker(single_turn)
    maker.open(client, byte_tokenizer(), config.seed)
    sampling = SamplingParameters(config.rollout.max_response_tokens)
    numbers = iter(range(samples))

    def take_group() -> tuple[int, list[PromptRequest]]:
        number = next(numbers)
        prompt = Prompt(str(number), "", tuple(range(65, 97)), "", "none")
        return number, requests_for_prompt(f"{number:08d}", prompt, GROUP, sampling)

    async def grade(episode: Episode) -> Episode:
        score = float(hash(episode[0].sample_id) % 2)
        return tuple(sample.changed(reward=Reward(score, bool(score), "")) for sample in episode)

    source = GroupSource(config.rollout, take_group, maker.make, grade, [], client.abort, last_iteration=1)
    taking = asyncio.ensure_future(source.take(1, 1))
    while not taking.done() and source.progress(1).finished < samples // 2:
        await asyncio.sleep(0.2)
    begin = time.process_time()
    source.progress(1)
    look = time.process_time() - begin
    batch = await taking
    client.close()
    return batch.samples, look


def response(place: int, tokens: int) -> Generation:
    """Random printable text."""
    random = np.random.default_rng(place)
    token_ids = TokenIds(random.integers(65, 91, tokens))
    logprobs = Logprobs(-random.random(tokens, np.float32))
    text = bytes(token_ids).decode()
    return Generation("", token_ids, logprobs, Status.COMPLETED, (VersionSpan(1, tokens),), 0, 1.0, 0, text=text)


def stand_in_engine(index: int, answers: Sequence[bytes]) -> RunningEngine:
    """An engine whose Ray actor is no process: it answers as fast as it is asked, AT_ONCE requests together."""

    async def answer(batch: Sequence[GenerateRequest]) -> list[Generation]:
        await asyncio.sleep(0)
        arrived = [pickle.loads(content) for content in answers[: len(batch)]]  # nosec B301: made above
        return [replace(one, request_id=request.request_id) for one, request in zip(arrived, batch, strict=True)]

    async def stream(batch: Sequence[GenerateRequest]) -> AsyncIterator[Any]:
        cloudpickle.dumps(batch, protocol=5)
        for begin in range(0, len(batch), AT_ONCE):
            yield answer(batch[begin : begin + AT_ONCE])

    remote = SimpleNamespace(remote=lambda *_: None)
    actor = SimpleNamespace(
        generate=SimpleNamespace(remote=stream), address=remote, start=remote, room_beside_bytes=remote
    )
    setup: Any = SimpleNamespace(index=index, log_path="none")
    return RunningEngine(setup, actor, state=EngineState.SERVING)


def recipe(samples: int, overrides: Sequence[str] = ()) -> Config:
    """The recipe of eight GPUs, spread over all of them: more data-parallel ranks and engines, layers that several GPUs
    share."""
    settings = ["model.path=configs/models/Qwen3.5-35B-A3B"]
    settings += [f"actor.{key}={value}" for key, value in _SPLIT.items()]
    settings += [f"actor.processes={GPUS}", f"rollout.engines={GPUS // NODE_GPUS}", "rollout.engine.tensor_parallel=8"]
    settings += [f"rollout.prompts_per_iteration={samples // GROUP}", f"rollout.samples_per_prompt={GROUP}"]
    return load_config(RECIPE, [*settings, *overrides])


def planned_step(samples: int) -> float:
    """Seconds of an iteration as `rlpipe plan` tells them, with responses at the recipe's limit."""
    config = recipe(samples)
    cluster = load_cluster("slurm_2x8x141gb").model_copy(update={"nodes": GPUS // NODE_GPUS})
    seconds = plan(config, planned_model(config), cluster).step_seconds
    assert seconds is not None
    return seconds


def weight_plan() -> Iterator[tuple[str, float]]:
    """What is planned once a run, whatever the number of GPUs."""
    config = recipe(GROUP)
    begin = time.perf_counter()
    model = trainable_model(dict(read_config(config.model.path).raw))
    buckets = plan_buckets(export_plan(model), config.weight_sync.bucket_bytes)
    yield f"weight plan of {len(buckets)} buckets", time.perf_counter() - begin


def placement() -> Iterator[tuple[str, float]]:
    """What grows with GPUs and not with samples."""
    config = recipe(GROUP, [f"ray.cpus={2 * GPUS}"])
    with ray_cluster(config):
        begin = time.perf_counter()
        with placements(config) as (actor, engines):
            count = f"{len(actor.bundles):,} processes and {len(engines.bundles)} engines"
            yield f"placement of {count}, with logical CPUs for GPUs", time.perf_counter() - begin


if __name__ == "__main__":
    main()
