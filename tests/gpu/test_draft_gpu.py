"""Speculative decoding on a GPU: the same distribution with drafts, log-probabilities of drafted tokens, updates of the
drafting layer, sleep, interruptions. Engines start beside each other on one GPU; a failure shows the end of its log."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting_policies import VOCABULARY, reference_logprobs, reference_samples, save_dense, save_hybrid
from rollout_models import stacked_state
from rollout_requests import generate, results_of

from rlpipe.config.root import Config
from rlpipe.shared.weight_channel import Listener
from rlpipe.shared.weights import BUFFERS, TensorSpec, WeightBucket, WeightGroup, checksum
from rlpipe.training.placement import Placement, _reserved
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: SGLang verifies drafts only there"),
    pytest.mark.timeout(600),
]

STEPS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "off": {},
    "mtp": {"draft": {"method": "mtp", "steps": STEPS}},
    "auto": {"draft": {"method": "auto", "steps": STEPS}},
    "ngram": {"draft": {"method": "ngram"}},
}


@dataclass
class Started:
    """An engine, or why it did not start."""

    pool: RolloutPool
    folder: str
    log: Path
    failure: str = ""

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-120:]) if self.log.exists() else "no log"


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[str, Started]]:
    """All of them, started at the same time."""
    scratch = tmp_path_factory.mktemp("drafts")
    hybrid, dense = save_hybrid(scratch / "hybrid", seed=0), save_dense(scratch / "dense", seed=0)
    config = _config()
    with ExitStack() as opened:
        opened.enter_context(ray_cluster(config))
        place = opened.enter_context(_reserved("drafts", 1, 1, config, cpus=len(ENGINES)))
        share: Placement = replace(place, gpus_per_bundle=1 / len(ENGINES))
        started = {}
        for name, settings in ENGINES.items():
            folder = dense if name == "ngram" else hybrid
            logs = scratch / name
            pool = opened.enter_context(RolloutPool.start(_config(**settings), folder, share, log_directory=str(logs)))
            started[name] = Started(pool, folder, logs / "rollout_engine_0.log")
        for name, one in started.items():
            try:
                one.pool.wait_until_ready()
            except Exception as error:  # its own tests fail, with its log
                one.failure = f"{type(error).__name__}: {error}"
            print(f"engine {name}: {one.failure or 'started'}", flush=True)
        yield started


def _engine(engines: dict[str, Started], name: str) -> Started:
    one = engines[name]
    if one.failure:
        pytest.fail(f"engine {name!r} did not start: {one.failure}\n{one.tail()}", pytrace=False)
    return one


def _generate(one: Started, requests: list[GenerateRequest]) -> list[Generation]:
    try:
        return generate(one.pool, requests, deadline_seconds=240)
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}\n{one.tail()}", pytrace=False)


def _requests(count: int, tokens: int, salt: str = "", **sampling: Any) -> list[GenerateRequest]:
    numbers = torch.Generator().manual_seed(3)
    parameters = SamplingParameters(tokens, ignore_eos=True, **sampling)
    return [
        GenerateRequest(
            f"{salt}{index}",
            tuple(torch.randint(0, VOCABULARY, (12 + index % 9,), generator=numbers).tolist()),
            parameters,
            sample_seed(1, f"{salt}{index}"),
        )
        for index in range(count)
    ]


def _error(folder: str, requests: list[GenerateRequest], answers: list[Generation]) -> float:
    """Mean |log-probability - that of transformers in float32|."""
    differences = []
    for request, answer in zip(requests, answers, strict=True):
        temperature = request.sampling.temperature or 1.0
        wanted = reference_logprobs(folder, request.prompt_ids, answer.token_ids, temperature)
        differences += (wanted - torch.tensor(answer.logprobs)).abs().tolist()
    return sum(differences) / len(differences)


def _pass_tokens(answers: list[Generation]) -> float:
    """Tokens of a verified pass."""
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(dict(enumerate(answer.kept_drafts)))
    return 1 + sum(kept * count for kept, count in counts.items()) / counts.total()


@pytest.mark.parametrize("name", ["mtp", "auto"])
def test_greedy_tokens_are_those_without_drafts(engines, name):
    requests = _requests(16, 64, temperature=0.0)
    plain = _generate(_engine(engines, "off"), requests)
    drafted = _generate(_engine(engines, name), requests)
    pairs = list(zip(plain, drafted, strict=True))
    different = [(a.request_id, a.token_ids, b.token_ids) for a, b in pairs if a.token_ids != b.token_ids]
    print(f"{name}: {_pass_tokens(drafted):.2f} tokens a pass at temperature 0, {len(different)} of 16 differ")
    assert not different
    assert _pass_tokens(drafted) > 3 or name == "auto"


@pytest.mark.parametrize("name", ["mtp", "auto", "ngram"])
def test_logprobs_of_drafted_tokens_are_the_models(engines, name):
    requests = _requests(24, 48, temperature=1.0) + _requests(8, 48, "tempered", temperature=0.7, top_p=0.9)
    one = _engine(engines, name)
    drafted = _generate(one, requests)
    error = _error(one.folder, requests, drafted)
    print(f"{name}: |log-probability - transformers| {error:.5f}, {_pass_tokens(drafted):.2f} tokens a pass")
    if name == "ngram":
        assert error < 0.02
    else:
        plain = _error(one.folder, requests, _generate(_engine(engines, "off"), requests))
        print(f"off: |log-probability - transformers| {plain:.5f}")
        assert error < 1.3 * plain + 0.003
    if name == "mtp":
        assert _pass_tokens(drafted) > 1.4
    for request, answer in zip(requests, drafted, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == request.sampling.max_new_tokens


def test_samples_are_those_without_drafts_as_far_as_rounding_allows(engines):
    """The same seeds: the random number of a position does not depend on the drafts."""
    requests = _requests(64, 24, "same", temperature=1.0)
    plain, drafted = (_generate(_engine(engines, name), requests) for name in ("off", "mtp"))
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    again = _generate(_engine(engines, "mtp"), requests[::-1])[::-1]
    repeated = sum(a.token_ids == b.token_ids for a, b in zip(again, drafted, strict=True))
    print(f"{equal} of 64 samples are equal with and without drafts, {repeated} of 64 when drafted again")
    assert equal > 32


@pytest.mark.parametrize("name", ["mtp", "ngram"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}])
def test_the_distribution_is_that_without_drafts(engines, name, sampling):
    """Other seeds, so that both are independent: homogeneity of the tokens at each place, by Pearson's chi-square."""
    one = _engine(engines, name)
    prompt, count, tokens = tuple(range(40, 60)), 3000, 6

    def sampled(where: Started, salt: str) -> torch.Tensor:
        parameters = SamplingParameters(tokens, ignore_eos=True, **sampling)
        requests = [
            GenerateRequest(f"{salt}{index}", prompt, parameters, sample_seed(2, f"{salt}{index}"))
            for index in range(count)
        ]
        return torch.tensor([answer.token_ids for answer in _generate(where, requests)])

    drafted = sampled(one, "drafted")
    plain = (
        reference_samples(one.folder, prompt, drafted.shape, sampling)
        if name == "ngram"
        else sampled(_engine(engines, "off"), "plain")
    )
    smallest = min(_homogeneity(drafted[:, place], plain[:, place]) for place in range(tokens))
    print(f"{name} {sampling}: smallest p-value of {tokens} places {smallest:.4f}")
    assert smallest > 1e-4


def _homogeneity(one: torch.Tensor, other: torch.Tensor) -> float:
    """p-value that both come from one distribution; rare tokens are one class."""
    table = torch.stack([torch.bincount(row, minlength=VOCABULARY) for row in (one, other)]).double()
    often = table.sum(0) >= 20
    table = torch.cat((table[:, often], table[:, ~often].sum(1, keepdim=True)), 1)
    table = table[:, table.sum(0) > 0]
    wanted = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((table.shape[1] - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if table.shape[1] > 1 else 1.0


def test_updates_reach_both_models_also_after_sleep_and_under_generation(engines, tmp_path):
    from actor.weight_transport import SharedBuffers

    one = _engine(engines, "mtp")
    other = save_hybrid(tmp_path / "other", seed=1)
    blind = save_hybrid(tmp_path / "blind", seed=1, drafts_well=False)
    states = [stacked_state(folder) for folder in (other, blind, one.folder)]
    plan = _plan(states[0])
    requests = _requests(16, 48, "updated", temperature=1.0)

    listener = Listener()
    group = WeightGroup("drafts", (listener.address,), 0, (0,), 1, BUFFERS)
    calls = one.pool.weights.join([group], one.pool.up())
    transport = SharedBuffers(listener, plan, 60)
    results_of(one.pool, calls, "joining")

    def update(version: int, state: dict[str, torch.Tensor], in_flight: bool = False) -> None:
        receiving = one.pool.weights.start_receiving(plan, version, in_flight)
        sums = []
        for bucket in plan:
            flat = transport.room(bucket).zero_()
            for spec, piece in zip(bucket.tensors, bucket.pieces(flat), strict=True):
                piece.copy_(state[spec.name])
            sums.append(checksum(flat.cpu().numpy().data))
            transport.publish(flat, lambda: False)
        transport.finish(lambda: False)
        assert results_of(one.pool, receiving, "weight_sync")[0].checksums == tuple(sums)

    lengths = []
    for version, (folder, state) in enumerate([(other, states[0]), (blind, states[1]), (other, states[0])], 1):
        update(version, state)
        answers = _generate(one, requests)
        lengths.append(_pass_tokens(answers))
        error = _error(folder, requests, answers)
        print(f"version {version}: error {error:.5f}, {lengths[-1]:.2f} tokens a pass")
        assert error < 0.02
    assert lengths[0] > 1.4 and lengths[1] < 1.2 and lengths[2] > 1.4

    one.pool.sleep(("weights", "kv_cache"))
    one.pool.wake(("weights", "kv_cache"))
    update(4, states[0])
    answers = _generate(one, requests)
    print(f"after sleep: error {_error(other, requests, answers):.5f}, {_pass_tokens(answers):.2f} tokens a pass")
    assert _error(other, requests, answers) < 0.02 and _pass_tokens(answers) > 1.4

    long = _requests(8, 1024, "long", temperature=1.0)
    interrupted = asyncio.run(_under_updates(one, long, lambda version: update(version, states[0], in_flight=True)))
    spans = [len(answer.versions) for answer in interrupted]
    print(f"interrupted: error {_error(other, long, interrupted):.5f}, versions of each response {spans}")
    assert max(spans) > 1 and _error(other, long, interrupted) < 0.02
    transport.leave()


async def _under_updates(one: Started, requests: list[GenerateRequest], update: Any) -> list[Generation]:
    """Answers, with updates to the same weights in the middle."""
    client = one.pool.client()
    try:
        running = asyncio.gather(*map(client.generate, requests))
        for version in (5, 6, 7):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(update, version)
        return await asyncio.wait_for(running, 240)
    finally:
        client.close()


def _plan(state: dict[str, torch.Tensor]) -> tuple[WeightBucket, ...]:
    specs = [TensorSpec(name, str(tensor.dtype).split(".")[1], tuple(tensor.shape)) for name, tensor in state.items()]
    size = -(-len(specs) // 4)
    parts = [tuple(specs[start : start + size]) for start in range(0, len(specs), size)]
    return tuple(map(WeightBucket, parts))


def _config(**engine: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "drafts", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": 32},
            "ray": {"colocate": True, "sleep": "always", "cpus": max(len(ENGINES), os.cpu_count() or 1)},
            "jit": {"warm_up": "off"},
            "weight_sync": {"verify": True},
            "deadlines": {"start_seconds": 420},
            "rollout": {
                "max_response_tokens": 1024,
                "engine": {
                    "dtype": "bfloat16",
                    "max_running_requests": 64,
                    "memory_fraction": 0.12,
                    "kv_cache_tokens": 131072,
                }
                | engine,
            },
        }
    )
