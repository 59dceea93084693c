"""Expert choices of the engine: refused when they are not complete and possible, laid into packs by position."""

from dataclasses import replace

import numpy as np
import pytest
from test_batching_packs import sample_of

from rlpipe.batching import PackLimits, pack_for_training
from rlpipe.batching.pack_routes import attach_routes, checked_routes
from rlpipe.flops.route_shape import route_shape
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.expert_routes import RouteShape

SHAPE = RouteShape(layers=3, expert_layers=(1, 2), experts=4, experts_per_token=2)


def routed_sample(number: int = 0, prompt: int = 3, response: int = 4):
    sample = sample_of(str(number), "g", prompt, response)
    generator = np.random.default_rng(number)
    routes = np.zeros((prompt + response - 1, 3, 2), np.int16)
    for token, layer in np.ndindex(len(routes), 2):
        routes[token, layer + 1] = generator.permutation(4)[:2]
    return replace(sample, routes=routes)


def changed(place, value):
    sample = routed_sample()
    routes = sample.routes.copy()
    routes[place] = value
    return replace(sample, routes=routes)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (replace(routed_sample(), routes=None), "needs routes of 6 tokens x 3 layers x 2 experts but has none"),
        (replace(routed_sample(), routes=routed_sample().routes[:-1]), r"has shape \(5, 3, 2\)"),
        (replace(routed_sample(), routes=routed_sample().routes[:, :2]), r"has shape \(6, 2, 2\)"),
        (changed((4, 1, 0), 4), "expert 4 of a model with 4"),
        (changed((4, 1, 0), -1), "expert -1 of a model with 4"),
        (changed((4, 2), (3, 3)), "token 4 is routed to one expert twice in layer 2"),
    ],
)
def test_impossible_routes_are_refused_by_name(sample, message):
    with pytest.raises(DataError, match=message):
        checked_routes(sample, SHAPE)


def test_layers_without_experts_may_hold_anything():
    assert (checked_routes(changed((slice(None), 0), 9), SHAPE)[:6, 0] == 9).all()


def test_packs_hold_the_routes_of_each_token_at_its_place():
    samples = [routed_sample(0), routed_sample(1, prompt=2, response=6)]
    packs = pack_for_training(
        samples,
        PackLimits(64, sequence_multiple=4, pack_multiple=4),
        data_parallel=1,
        aggregation="token_mean",
        norm_tokens=1,
    ).ranks
    routes = {sample.sample_id: checked_routes(sample, SHAPE) for sample in samples}
    (((pack,),),) = attach_routes(packs, routes, SHAPE)
    assert pack.routes.shape == (pack.padded_tokens, 3, 2)
    for sample_id, start, length in zip(pack.sample_ids, pack.cu_seqlens_padded, pack.lengths_tokens, strict=False):
        sample = next(one for one in samples if one.sample_id == sample_id)
        np.testing.assert_array_equal(pack.routes[start : start + length - 1], sample.routes)
        assert (pack.routes[start + length - 1, 1:] == [0, 1]).all()


def test_a_model_without_experts_has_no_routes():
    assert route_shape(describe_model("Qwen3-30B-A3B").shape).experts_per_token == 8
    with pytest.raises(ConfigError, match="has no experts"):
        route_shape(describe_model("Qwen3-8B").shape)
