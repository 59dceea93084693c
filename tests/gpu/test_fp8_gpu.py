"""An engine with FP8 weights and cache: close to the policy, the same after an update as after its start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drafting_policies import save_hybrid
from rollout_models import stacked_state
from rollout_requests import results_of
from test_draft_gpu import Started, _config, _engine, _error, _generate, _plan, _requests

from rlpipe.shared.block_fp8 import quantize_blocks, quantized
from rlpipe.shared.weight_channel import Listener
from rlpipe.shared.weights import BUFFERS, WeightGroup
from rlpipe.training.placement import engine_placement
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: FP8 has no kernels elsewhere"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module", params=[("fp8", "auto"), ("fp8_all", "fp8")])
def engine(request, tmp_path_factory) -> Iterator[tuple[Started, str]]:
    """With its quantization."""
    scratch = tmp_path_factory.mktemp("fp8")
    folder = save_hybrid(scratch / "hybrid", seed=0)
    quantization, cache = request.param
    config = _config(quantization=quantization, kv_cache_dtype=cache, draft={"method": "mtp"})
    with (
        ray_cluster(config),
        engine_placement(config) as place,
        RolloutPool.start(config, folder, place, log_directory=str(scratch)) as pool,
    ):
        one = Started(pool, folder, scratch / "rollout_engine_0.log")
        try:
            pool.wait_until_ready()
        except Exception as error:
            one.failure = f"{type(error).__name__}: {error}"
        yield one, quantization


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 128), (300, 200), (3, 130, 256), (257, 1024, 2048)])
def test_a_gpu_quantizes_as_torch_does_on_a_cpu(shape, dtype):
    """Bit by bit, also what is not finite, at the edges, and beyond 2^29 elements."""
    torch.manual_seed(0)
    weight = (torch.randn(shape, device="cuda") * torch.rand(shape[-2], 1, device="cuda")).to(dtype)
    weight[..., :128, :128] = 0
    for value in (1.0, float("nan"), float("inf"), -float("inf")):
        weight[..., -1, -1] = value
        last = weight.reshape(-1, *shape[-2:])[-3:].reshape(-1, *shape[-2:])
        numbers, scales = quantize_blocks(weight)
        wanted_numbers, wanted_scales = quantize_blocks(last.cpu())
        for found, wanted in ((numbers, wanted_numbers), (scales, wanted_scales)):
            found = found.reshape(-1, *found.shape[-2:])[-3:].float().cpu()
            assert torch.equal(found.nan_to_num(nan=7e7), wanted.float().nan_to_num(nan=7e7))


def test_an_update_gives_what_the_start_gave(engine, tmp_path):
    from actor.weight_transport import SharedBuffers

    started, quantization = engine
    one = _engine({"fp8": started}, "fp8")
    other = save_hybrid(tmp_path / "other", seed=1)
    requests = _requests(24, 48, temperature=1.0)
    at_start = _generate(one, requests)
    print(f"start: |log-probability - transformers| {_error(one.folder, requests, at_start):.5f}")
    assert _error(one.folder, requests, at_start) < 0.1

    plan = _plan(_as_sent(other, quantization))
    listener = Listener()
    calls = one.pool.weights.join([WeightGroup("fp8", (listener.address,), 0, (0,), 1, BUFFERS)], one.pool.up())
    transport = SharedBuffers(listener, plan, 60)
    results_of(one.pool, calls, "joining")
    for version, folder in enumerate((other, one.folder, other, one.folder), 1):
        state = _as_sent(folder, quantization)
        receiving = one.pool.weights.start_receiving(plan, version)
        for bucket in plan:
            flat = transport.room(bucket)
            for spec, piece in zip(bucket.tensors, bucket.pieces(flat), strict=True):
                piece.copy_(state[spec.name])
            transport.publish(flat, lambda: False)
        transport.finish(lambda: False)
        receipt = results_of(one.pool, receiving, "weight_sync")[0]
        answers = _generate(one, requests)
        error = _error(folder, requests, answers)
        print(f"version {version}: |log-probability - transformers| {error:.5f}, received in {receipt.seconds:.3f} s")
        assert error < 0.1
    differences = [
        abs(a - b)
        for before, after in zip(at_start, answers, strict=True)
        for a, b in zip(before.logprobs[:1], after.logprobs[:1], strict=True)
        if before.token_ids[:1] == after.token_ids[:1]
    ]
    print(f"first log-probabilities after the start and after an update to the same weights: {max(differences):.6f}")
    assert max(differences) < 1e-3 and len(differences) == len(requests)
    transport.leave()


def _as_sent(folder: Path, quantization: str) -> dict[str, torch.Tensor]:
    """The policy's tensors as the actor sends them."""
    state = stacked_state(folder).items()
    return {name: part for whole in state for name, part in quantized(*whole, quantization)}
