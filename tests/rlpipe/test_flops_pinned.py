"""Integers worked out by hand from the three bundled configs; Megatron-Bridge's code gives those of Qwen3-8B too."""

import json
from pathlib import Path

import pytest

from rlpipe.flops import Convention, Frozen, Grid, Part, model_flops, sequence_cost
from rlpipe.model.model_reader import describe_model

MODELS = Path(__file__).parents[2] / "configs" / "models"
PACKED = (1024, 512, 2048, 300, 212)
QWEN3_8B, QWEN3_30B, QWEN3_5_35B = "Qwen3-8B", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B"


@pytest.mark.parametrize(
    ("model", "length", "convention", "train_per_token"),
    [
        (QWEN3_8B, 4096, "causal_half", 49_032_462_336),
        (QWEN3_8B, 4096, "causal_exact", 49_033_347_072),
        (QWEN3_8B, 4096, "full", 52_656_340_992),
        (QWEN3_30B, 4096, "causal_half", 23_081_779_200),
        (QWEN3_30B, 32768, "causal_half", 56_904_646_656),
        (QWEN3_30B, 32768, "causal_exact", 56_905_826_304),
        (QWEN3_30B, 32768, "full", 95_559_352_320),
        (QWEN3_5_35B, 4096, "causal_half", 19_061_637_120),
        (QWEN3_5_35B, 8192, "causal_half", 20_068_270_080),
        (QWEN3_5_35B, 32768, "causal_half", 26_108_067_840),
        (QWEN3_5_35B, 32768, "causal_exact", 26_108_313_600),
        (QWEN3_5_35B, 32768, "full", 34_161_131_520),
        (QWEN3_5_35B, 131072, "causal_half", 50_267_258_880),
    ],
)
def test_train_flops_of_one_sequence(model, length, convention, train_per_token):
    breakdown = model_flops(describe_model(model).shape, [length], Convention(convention))
    assert breakdown.train == train_per_token * length


@pytest.mark.parametrize(("model", "train"), [(QWEN3_8B, 190_983_441_481_728), (QWEN3_5_35B, 75_339_375_575_040)])
def test_packed_sequences(model, train):
    assert model_flops(describe_model(model).shape, PACKED).train == train


def test_packed_sequences_cost_less_than_one_sequence_of_their_total():
    shape = describe_model(QWEN3_8B).shape
    one_sequence = model_flops(shape, [sum(PACKED)])
    assert one_sequence.train == 200_836_965_728_256
    assert one_sequence.train / model_flops(shape, PACKED).train == pytest.approx(1.05159, abs=1e-5)


def test_layers_of_the_hybrid_model():
    shape = describe_model(QWEN3_5_35B).shape
    attention, delta_net = shape.layers[3].mixer, shape.layers[0].mixer
    assert attention.weights_flops == 54_525_952
    assert attention.core_flops_per_doubled_pair == 8192
    assert delta_net.weights_flops + delta_net.core_flops == 71_630_848
    assert shape.layers[0].feed_forward.weights_flops == 57_675_776
    assert shape.head_flops == 1_017_118_720
    cost = sequence_cost(shape)
    assert (cost.linear, 3 * cost.quadratic) == (6_018_334_720, 245_760)


def test_layers_of_the_dense_and_the_sparse_model():
    dense, sparse = describe_model(QWEN3_8B).shape, describe_model(QWEN3_30B).shape
    assert (dense.layers[0].mixer.weights_flops, dense.layers[0].feed_forward.weights_flops) == (
        83_886_080,
        301_989_888,
    )
    assert (dense.head_flops, sequence_cost(dense).linear) == (1_244_659_712, 15_136_194_560)
    assert sparse.layers[0].mixer.weights_flops == 37_748_736
    assert sparse.layers[0].feed_forward.weights_flops == 75_497_472 + 524_288
    assert (sparse.head_flops, sequence_cost(sparse).linear) == (622_329_856, 6_083_313_664)


@pytest.mark.parametrize("place", ["text_config", "top"])
def test_a_multi_token_prediction_layer(place):
    config = json.loads((MODELS / QWEN3_5_35B / "config.json").read_text())
    section = config["text_config"] if place == "text_config" else config
    section["mtp_num_hidden_layers"] = 1
    shape = describe_model(config).shape
    with_mtp = model_flops(shape, [4096])
    assert with_mtp.train == 22_600_593_408 * 4096
    assert with_mtp.logprob * 3 == model_flops(shape, [4096], include_mtp=False).train == 19_061_637_120 * 4096


def test_vision_tower():
    tower, image = describe_model(QWEN3_5_35B).shape.vision, Grid(1, 32, 32)
    assert tower.patch_embed_flops(image) == 3_623_878_656
    assert tower.block_weights_flops(image) == 841_872_310_272
    assert tower.attention_core_flops(image) == 130_459_631_616
    assert tower.merger_flops(image) == 15_703_474_176


def test_a_video_costs_its_frames():
    shape = describe_model(QWEN3_5_35B).shape
    image = model_flops(shape, [], grids=[Grid(1, 32, 32)])
    video = model_flops(shape, [], grids=[Grid(4, 32, 32)])
    assert image.per_layer_type["vision"] == 991_659_294_720
    assert video.forward == 4 * image.forward


def test_frozen_parts():
    shape = describe_model(QWEN3_5_35B).shape
    breakdown = model_flops(shape, [4096], grids=[Grid(1, 32, 32)])
    frozen = {Part.VISION: Frozen.NO_GRADIENTS, Part.GDN: Frozen.GRADIENTS_PASS, Part.MOE: Frozen.GRADIENTS_PASS}
    gdn_weights = 4096 * 30 * shape.layers[0].mixer.weights_flops
    saved = 2 * 991_659_294_720 + gdn_weights + breakdown.per_layer_type["moe"]
    assert breakdown.train - breakdown.train_with_frozen(frozen) == saved
