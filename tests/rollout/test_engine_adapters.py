"""A real SGLang engine that keeps an adapter beside the model: updates of the adapter alone."""

import random

import pytest
import ray
import torch
from rollout_models import reference_logprobs, save_dense, state
from rollout_requests import answers, generate, make_requests, mixed_requests
from rollout_weight_source import WeightSource, plan_of
from safetensors.torch import save_file

from rlpipe.shared.weights import ADAPTER_ROOT, EngineAdapter
from rollout.pool import RolloutPool

RANK, SCALE = 3, 1.7
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_factors(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Of every projection but k, which gets zeros as of one without an adapter."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(MODULES):
            size = 0.0 if module.endswith("k_proj") else 0.3
            out, wide = weight.shape
            found[f"{ADAPTER_ROOT}{module}.lora_A.weight"] = size * torch.randn(RANK, wide, generator=generator)
            found[f"{ADAPTER_ROOT}{module}.lora_B.weight"] = size * torch.randn(out, RANK, generator=generator)
    return found


def save_merged(base: str, factors: dict[str, torch.Tensor], folder) -> str:
    """The model that the adapter makes of `base`."""
    save_dense(folder, seed=0)
    merged = dict(state(base))
    for name, weight in merged.items():
        root = ADAPTER_ROOT + name.removesuffix(".weight")
        if f"{root}.lora_A.weight" in factors:
            merged[name] = weight + SCALE * factors[f"{root}.lora_B.weight"] @ factors[f"{root}.lora_A.weight"]
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def logprob_error(folder: str, requests, generations) -> float:
    expected = [
        reference_logprobs(folder, request.prompt_ids, one.token_ids)
        for request, one in zip(requests, generations, strict=True)
    ]
    found = [torch.tensor(one.logprobs) for one in generations]
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))


@pytest.fixture(scope="module")
def pool(ray_session, dense_folder, config_of, tmp_path_factory):
    adapter, logs = EngineAdapter(RANK, SCALE, MODULES), str(tmp_path_factory.mktemp("adapter_logs"))
    with RolloutPool.start(config_of(), dense_folder, log_directory=logs, adapter=adapter) as pool:
        pool.wait_until_ready()
        yield pool


@pytest.mark.slow
def test_updates_of_the_adapter_alone_make_the_engine_the_merged_model(pool, dense_folder, tmp_path):
    weights, requests = state(dense_folder), make_requests(4)
    plain = generate(pool, requests)
    assert logprob_error(dense_folder, requests, plain) < 1e-4
    source = WeightSource.remote()
    group = ray.get(source.open.remote(1))
    calls = pool.weights.join([group], pool.up())
    ray.get([source.join.remote(group), *calls.references])

    def update(version: int, tensors: dict[str, torch.Tensor]) -> None:
        plan = plan_of(tensors, 2)
        receiving = pool.weights.start_receiving(plan, version)
        sent = ray.get(source.send.remote(tensors, plan))
        (receipt,) = ray.get(list(receiving.references))
        assert receipt.checksums == sent

    for version in (1, 2):
        factors = random_factors(weights, version)
        update(version, factors)
        merged = save_merged(dense_folder, factors, tmp_path / str(version))
        found = generate(pool, requests)
        assert logprob_error(merged, requests, found) < 1e-4
        assert logprob_error(dense_folder, requests, found) > 0.1
        assert {span.version for one in found for span in one.versions} == {version}
    _assert_company_changes_nothing(pool)
    update(3, weights)  # without the adapter: a merged model
    assert answers(generate(pool, requests)) == answers(plain)
    pool.weights.leave()
    ray.kill(source)


def _assert_company_changes_nothing(pool: RolloutPool) -> None:
    requests = mixed_requests()
    expected = answers(generate(pool, requests))
    shuffled = random.Random(1).sample(requests, len(requests))
    again = {}
    for part in (shuffled[:1], shuffled[1:3], shuffled[3:]):
        again |= answers(generate(pool, part))
    assert again == expected
