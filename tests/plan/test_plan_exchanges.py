"""Bytes that the planner says ranks send each other against those that a real forward pass sends, and what it makes of
them."""

from pathlib import Path

import pytest
from plan_models import SMALL, write_model
from train_support import run_processes

from rlpipe.commands.clusters import load_cluster
from rlpipe.config.actor import ActorConfig, ParallelConfig
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.estimate.exchanges import exchange_seconds, expert_bytes, split_layer_bytes
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.project_files import CONFIGS

PERIOD = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TOKENS, FLOAT32_OVER_PLANNED = 2048, 2
LAYOUTS = {
    "tensor": ParallelConfig(tensor=2, sequence=True),
    "context": ParallelConfig(context=2),
    "expert": ParallelConfig(expert=2),
    "context and expert": ParallelConfig(context=2, expert=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of four and of eight layers, so that the difference leaves head and loss out."""

    def model(kind: str, periods: int) -> Path:
        types = {"layer_types": PERIOD * periods} if kind == "hybrid" else {}
        sizes = SMALL | {"num_hidden_layers": len(PERIOD) * periods} | types
        return write_model(tmp_path_factory.mktemp(kind), kind, sizes)

    return {kind: [model(kind, periods) for periods in (1, 2)] for kind in ("dense", "hybrid")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", "tensor"),
        ("dense", "context"),
        pytest.param("hybrid", "tensor", marks=pytest.mark.slow),
        pytest.param("hybrid", "context", marks=pytest.mark.slow),
        pytest.param("hybrid", "expert", marks=pytest.mark.slow),
        ("hybrid", "context and expert"),
    ],
)
def test_a_forward_pass_sends_what_was_planned(models, kind, layout):
    from plan_workers import sent_in_a_forward_pass

    parallel = LAYOUTS[layout]
    settings = {"dtype": "float32", "max_tokens_per_gpu": TOKENS, "parallel": parallel.model_dump()}
    actor = ActorConfig.model_validate({"processes": 2, **settings})
    sent = run_processes(2, sent_in_a_forward_pass, models[kind], actor)
    shape = describe_model(models[kind][0]).shape
    layers = [
        split_layer_bytes(layer, shape.hidden_size, parallel) + expert_bytes(layer, shape.hidden_size, parallel)
        for layer in shape.layers
    ]
    mean = sum(eight - four for four, eight in sent) / len(sent)
    assert FLOAT32_OVER_PLANNED * TOKENS * sum(layers) == pytest.approx(mean, rel=0.05)


def _seconds(cluster: ClusterConfig, **parallel: object) -> float:
    overrides = [f"actor.parallel={ParallelConfig.model_validate(parallel).model_dump_json()}", "actor.processes=16"]
    config = load_config(CONFIGS / "recipes/qwen3_5_35b_a3b_dapo.yaml", [*overrides, "rollout.engines=8"])
    shape = describe_model(Path("Qwen3.5-35B-A3B")).shape
    return exchange_seconds(config, shape, cluster, own_tokens=1e6, own_packs=32)


def _cluster(gpus: int, **speeds: float) -> ClusterConfig:
    network = {"gpu_to_gpu_gigabytes_per_second": 400, "node_to_node_gigabytes_per_second": 400}
    node = {"gpus": gpus, "gpu": "NVIDIA H200", "gpu_memory_gigabytes": 141, "memory_gigabytes": 1000}
    return ClusterConfig.model_validate(
        {"kind": "local", "node": node, "network": network, "speeds": {"split_layer_seconds": 0.0} | speeds}
    )


def test_experts_of_one_node_go_over_the_link_between_gpus_and_those_of_several_share_the_nodes_own():
    sixteen, eight = _seconds(_cluster(16), expert=16), _seconds(_cluster(8), expert=16)
    assert eight == pytest.approx(8 * sixteen)
    assert _seconds(_cluster(8), expert=8) == pytest.approx(sixteen * (7 / 8) / (15 / 16))


def test_each_doubling_of_tensor_and_context_ranks_costs_every_layer_of_every_pack_once_more():
    without, with_it = (
        [
            _seconds(_cluster(16, split_layer_seconds=seconds), tensor=tensor, sequence=tensor > 1, context=context)
            for tensor, context in ((1, 1), (2, 1), (2, 4))
        ]
        for seconds in (0.0, 0.001)
    )
    assert [b - a for a, b in zip(without, with_it, strict=True)] == pytest.approx(
        [0.0, 32 * 40 * 1e-3, 3 * 32 * 40e-3]
    )
    assert without[0] == 0.0


def test_processes_on_cpus_exchange_for_nothing():
    assert _seconds(load_cluster("local_cpu"), tensor=2, sequence=True, context=2) == 0.0
