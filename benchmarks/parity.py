"""The parity ladder: what has to give the same log-probabilities, rung by rung, and by how much each differs.

    python benchmarks/parity.py                     a dense policy and a hybrid one with experts, both random
    python benchmarks/parity.py --policies dense    one of them

Real engines and real actors on whatever is here; differences are of log-probabilities of sampled tokens, in nats: the
largest, or where bfloat16 rounds, as engines do on a GPU, the mean. A rung that this machine cannot try is "not run
here", with the reason. Exit code 1 where a difference is above what its rung allows.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from actor.group import ActorGroup
from rlpipe.batching import PackLimits, logprobs_by_sample, pack_for_logprobs
from rlpipe.batching.logprobs import response_logprobs
from rlpipe.config.model import TinyPolicyConfig
from rlpipe.config.root import Config
from rlpipe.prepare.tiny_policy import make_tiny_policy
from rlpipe.shared.sample import Prompt, Sample
from rlpipe.training.placement import actor_placement, engine_placement
from rlpipe.training.ray_cluster import ray_cluster
from rollout.partial_response import PartialResponse
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed

REQUESTS, NEW_TOKENS, DEADLINE_SECONDS = 24, 24, 300
SHARPENING = 4.0
"""Random weights are multiplied by it, so that each of them matters to what is sampled."""
MORE_THAN_ROUNDING = 2.0
"""Most that one computation in bfloat16 may differ from another one of either dtype, over what transformers in bfloat16
differs from itself in float32: with weights this sharp, rounding sends some tokens to other experts, and how many is a
matter of the policy."""
ON_GPU = torch.cuda.is_available()

POLICIES = {
    "dense": TinyPolicyConfig(layers=4),
    "hybrid": TinyPolicyConfig(architecture="qwen3_5_moe", layers=4),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {},
    "tensor 2": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "context 2": {"context": 2},
    "expert 2": {"expert": 2},
}
Logprobs = Mapping[str, NDArray[np.float32]]
"""By request, of its response's tokens."""


@dataclass(frozen=True)
class Rung:
    """One comparison. difference: largest |a - b| in nats, None where it was not tried; `note` then says why."""

    name: str
    policy: str
    difference: float | None
    allowed: float
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return "not run here"
        return "ok" if self.difference <= self.allowed else "TOO FAR"

    def __str__(self) -> str:
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        return f"{self.name:40}{self.policy:8}{difference:>9}{self.allowed:9.1e}  {self.verdict:13}{self.note}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    options = parser.parse_args()
    print(f"{'rung':40}{'policy':8}{'differs':>9}{'allowed':>9}  verdict", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ray_cluster(_config(Path(folder))):
        for name in options.policies:
            for rung in ladder(name, Path(folder)):
                print(rung, flush=True)
                failed += rung.verdict == "TOO FAR"
    sys.exit(f"{failed} rungs are too far" if failed else 0)


def ladder(name: str, folder: Path) -> Iterator[Rung]:
    """The rungs of one policy, from one engine alone to engines and actors of other layouts and data types."""
    policy = folder / name
    make_policy(POLICIES[name], policy)
    requests = make_requests()
    exact = 0.0 if not ON_GPU or name == "dense" else None  # where bits are promised (docs/determinism.md)
    with running_pool(policy, folder) as pool:
        together = generate(pool, requests)
        samples = [sample_of(request, together[request.request_id]) for request in requests]
        reference = transformers_logprobs(policy, samples)
        by_rounding_alone = differ_in_mean(transformers_logprobs(policy, samples, "bfloat16"), reference)
        allowed = MORE_THAN_ROUNDING * by_rounding_alone

        def against(rung: str, other: Mapping[str, Generation], exact: float | None) -> Rung:
            if exact is None:
                return Rung(f"{rung}, mean", name, until_they_part(together, other), allowed)
            return Rung(rung, name, furthest(together, other), exact)

        yield against("batch invariance, one by one", one_by_one(pool, requests), exact)
        continued = generate(pool, [halved(request, together[request.request_id]) for request in requests])
        as_read = None if ON_GPU else 0.0 if name == "dense" else 1e-4
        yield against("engine: prefill = decode", continued, as_read)

    one_rank = actor_logprobs(samples, _config(policy), folder / f"{name}-exported")
    rounded = actor_logprobs(samples, _config(policy, dtype="bfloat16"))
    if ON_GPU:
        yield Rung("actor = engine, mean", name, differ_in_mean(rounded, logprobs_of(together)), allowed)
    else:
        yield Rung("actor = engine", name, differ(one_rank, logprobs_of(together)), 1e-4)
    yield from _layouts(name, policy, samples, one_rank)
    with running_pool(folder / f"{name}-exported", folder) as pool:
        yield against("export, reload: engine = engine", generate(pool, requests), exact)
    yield Rung("bfloat16 against float32, mean", name, differ_in_mean(rounded, one_rank), allowed)
    if ON_GPU:
        yield Rung("GPU = CPU on equal weights", name, differ(one_rank, reference), 5e-3)
    else:
        yield Rung("actor = transformers", name, differ(one_rank, reference), 1e-4)
        yield Rung("GPU = CPU on equal weights", name, None, 5e-3, "no GPU")
    yield _drafts(name, policy, folder, requests, allowed)


def _drafts(name: str, policy: Path, folder: Path, requests: Sequence[GenerateRequest], allowed: float) -> Rung:
    """Tokens that n-grams drafted and the policy kept have the log-probabilities that the actor gives them."""
    rung = "drafts on: actor = engine, mean"
    if not ON_GPU:
        return Rung(rung, name, None, allowed, "engines draft on GPUs alone")
    if name == "hybrid":
        return Rung(rung, name, None, allowed, "n-grams do not draft for Gated DeltaNet layers")
    with running_pool(policy, folder, draft={"method": "ngram"}) as pool:
        drafted = generate(pool, requests)
    samples = [sample_of(request, drafted[request.request_id]) for request in requests]
    rounded = actor_logprobs(samples, _config(policy, dtype="bfloat16"))
    return Rung(rung, name, differ_in_mean(rounded, logprobs_of(drafted)), allowed)


def _layouts(name: str, policy: Path, samples: Sequence[Sample], one_rank: Logprobs) -> Iterator[Rung]:
    gpus = torch.cuda.device_count()
    allowed = 5e-3 if ON_GPU and name == "hybrid" else 1e-4  # Triton's kernels multiply float32 in TF32
    for layout, parallel in LAYOUTS.items():
        rung = f"layout {layout} = one rank"
        if "expert" in parallel and name == "dense":
            continue
        if gpus == 1:
            yield Rung(rung, name, None, allowed, "needs 2 GPUs")
            continue
        config = _config(policy, processes=2, parallel=parallel)
        yield Rung(rung, name, differ(actor_logprobs(samples, config), one_rank), allowed)


def make_policy(shape: TinyPolicyConfig, folder: Path) -> None:
    """Random, and sharp enough that no matrix can be wrong unseen."""
    make_tiny_policy(shape, folder, seed=0)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    sharp = {name: tensor * SHARPENING if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(sharp, file, metadata={"format": "pt"})


def make_requests() -> list[GenerateRequest]:
    """Prompts of 5 to 40 tokens; each response is as long as it may be."""
    numbers = random.Random(0)
    sampling = SamplingParameters(NEW_TOKENS, ignore_eos=True)
    prompts = [tuple(numbers.randrange(256) for _ in range(numbers.randint(5, 40))) for _ in range(REQUESTS)]
    return [GenerateRequest(f"r{at}", ids, sampling, sample_seed(7, f"r{at}")) for at, ids in enumerate(prompts)]


def halved(request: GenerateRequest, answer: Generation) -> GenerateRequest:
    """The same request with the first half of its answer given, which the engine then reads as a prompt."""
    half = len(answer.token_ids) // 2
    partial = PartialResponse().extended(answer.token_ids[:half], answer.logprobs[:half], answer.versions[0].version)
    return replace(request, partial=partial)


@contextmanager
def running_pool(policy: Path, folder: Path, draft: Mapping[str, Any] | None = None) -> Iterator[RolloutPool]:
    """One engine that is ready. draft: settings of `rollout.engine.draft`."""
    config = _config(policy, draft=draft)
    with (
        engine_placement(config) as placement,
        RolloutPool.start(config, str(policy), placement, str(folder / "logs")) as pool,
    ):
        pool.wait_until_ready()
        yield pool


def generate(pool: RolloutPool, requests: Sequence[GenerateRequest]) -> dict[str, Generation]:
    """Answers by request, asked for all at once."""
    client = pool.client()

    async def all_answers() -> list[Generation]:
        return await asyncio.wait_for(asyncio.gather(*map(client.generate, requests)), DEADLINE_SECONDS)

    try:
        return {answer.request_id: answer for answer in asyncio.run(all_answers())}
    finally:
        client.close()


def one_by_one(pool: RolloutPool, requests: Sequence[GenerateRequest]) -> dict[str, Generation]:
    """The same, each in a batch of its own, in the opposite order."""
    found: dict[str, Generation] = {}
    for request in reversed(requests):
        found |= generate(pool, [request])
    return found


def furthest(first: Mapping[str, Generation], second: Mapping[str, Generation]) -> float:
    """Largest difference of log-probabilities; infinite where tokens differ."""
    if any(first[name].token_ids != second[name].token_ids for name in first):
        return float("inf")
    return differ(logprobs_of(first), logprobs_of(second))


def until_they_part(first: Mapping[str, Generation], second: Mapping[str, Generation]) -> float:
    """Mean difference of log-probabilities up to where a response of one is no longer that of the other, since rounding
    may turn a draw; infinite where that leaves less than half of all tokens."""
    differences: list[float] = []
    for name, one in first.items():
        pairs = zip(one.token_ids, second[name].token_ids, one.logprobs, second[name].logprobs, strict=True)
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        differences += [abs(logprob - other) for _, _, logprob, other in common]
    enough = 2 * len(differences) >= sum(len(one.token_ids) for one in first.values())
    return fmean(differences) if enough else float("inf")


def logprobs_of(answers: Mapping[str, Generation]) -> Logprobs:
    return {name: np.array(answer.logprobs, np.float32) for name, answer in answers.items()}


def differ(first: Logprobs, second: Logprobs) -> float:
    return float(max(np.max(np.abs(first[name] - second[name])) for name in first))


def differ_in_mean(first: Logprobs, second: Logprobs) -> float:
    """Over all tokens."""
    return float(np.mean(np.abs(np.concatenate([first[name] - second[name] for name in first]))))


def sample_of(request: GenerateRequest, answer: Generation) -> Sample:
    """What the driver would make of an answer, all its tokens trained."""
    prompt = Prompt(request.request_id, "", request.prompt_ids, "", "parity")
    return Sample(
        sample_id=request.request_id,
        group_id=request.request_id,
        prompt=prompt,
        response_ids=answer.token_ids,
        response_text="",
        rollout_logprobs=answer.logprobs,
        loss_mask=(1,) * len(answer.token_ids),
        versions=answer.versions,
        status=answer.status,
        engine=answer.engine,
        advantage=1.0,
    )


def actor_logprobs(samples: Sequence[Sample], config: Config, export_to: Path | None = None) -> Logprobs:
    """Under an actor of this configuration, which then writes its policy where that is asked for."""
    with actor_placement(config) as placement:
        actor = ActorGroup.start(config, placement)
        try:
            limits = PackLimits.forward_only(config.actor)
            packs = pack_for_logprobs(samples, limits, data_parallel=actor.layout.data_parallel).ranks
            found = logprobs_by_sample(packs, actor.logprobs(packs))
            if export_to is not None:
                actor.save_hf(export_to)
        finally:
            actor.stop()
    return {sample.sample_id: response_logprobs(sample, found[sample.sample_id]) for sample in samples}


def transformers_logprobs(policy: Path, samples: Sequence[Sample], dtype: str = "float32") -> Logprobs:
    """On the CPU, by a process that sees no GPU: beside one, transformers takes kernels that need it where FLA is."""
    sequences = [[*sample.prompt.token_ids, *sample.response_ids] for sample in samples]
    asked = {"policy": str(policy), "dtype": dtype, "sequences": sequences}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("transformers_run.py"))],
        input=json.dumps(asked),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = zip(samples, json.loads(done.stdout), strict=True)
    return {sample.sample_id: np.array(row[-len(sample.response_ids) :], np.float32) for sample, row in rows}


def _config(
    policy: Path,
    dtype: str = "float32",
    processes: int = 1,
    parallel: Mapping[str, Any] | None = None,
    draft: Mapping[str, Any] | None = None,
) -> Config:
    engine: dict[str, Any] = {"dtype": "float32", "max_running_requests": REQUESTS, "kv_cache_tokens": 4096}
    if ON_GPU:
        engine |= {"dtype": "bfloat16", "memory_fraction": 0.2}
    if draft:
        engine["draft"] = dict(draft)
    return Config.model_validate(
        {
            "run": {"name": "parity", "iterations": 1},
            "model": {"path": str(policy)},
            "data": {"train": [{"name": "none", "path": "none"}], "max_prompt_tokens": 64},
            "rollout": {"max_response_tokens": NEW_TOKENS, "engine": engine},
            "actor": {
                "dtype": dtype,
                "processes": processes,
                "parallel": dict(parallel or {}),
                "max_tokens_per_gpu": 512,
            },
            "ray": {"cpus": 8},
        }
    )


if __name__ == "__main__":
    main()
