"""How published figures came about: ours must explain them, not only differ from them."""

import importlib.util
from pathlib import Path

import pytest

from rlpipe.flops import Grid, batch_lengths, model_flops, tflops_per_gpu, utilization
from rlpipe.model.model_reader import describe_model

PROJECT = Path(__file__).parents[2]
# By its path: a folder of benchmarks on sys.path would hide the packages `rollout` and `rewards` from all other tests.
_SPEC = importlib.util.spec_from_file_location("field_flops", PROJECT / "benchmarks" / "field_flops.py")
field_flops = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(field_flops)

QWEN3_8B, QWEN3_5_35B = "Qwen3-8B", "Qwen3.5-35B-A3B"

# THUDM/slime pull request 1947: eight GPUs; tokens per second of the whole job and TFLOPS of each GPU, four runs.
SLIME_TABLE = [(989.3, 2.23), (2095.6, 4.72), (1105.6, 2.49), (2911.2, 6.56)]
SLIME_EFFECTIVE_LENGTH = 4741


def _slime_train_flops_per_token(length):
    return field_flops.slime(field_flops.read_sizes(), length)


@pytest.mark.parametrize(("tokens_per_second", "published_tflops"), SLIME_TABLE)
def test_four_tflops_figures_under_the_formula_that_produced_them(tokens_per_second, published_tflops):
    flops_per_token = _slime_train_flops_per_token(SLIME_EFFECTIVE_LENGTH)
    tflops = tflops_per_gpu(round(flops_per_token * tokens_per_second), seconds=1, gpus=8)
    assert tflops == pytest.approx(published_tflops, abs=0.006)


def test_the_best_of_them_under_the_right_formula():
    per_sequence = model_flops(describe_model(QWEN3_5_35B).shape, [SLIME_EFFECTIVE_LENGTH]).train
    seconds_per_sequence = SLIME_EFFECTIVE_LENGTH / 2911.2
    assert tflops_per_gpu(per_sequence, seconds_per_sequence, gpus=8) == pytest.approx(6.99, abs=0.01)
    assert utilization(per_sequence, seconds_per_sequence, 8, 989.5) == pytest.approx(0.0071, abs=1e-4)
    assert utilization(per_sequence, seconds_per_sequence, 8, peak_tflops=None) is None


@pytest.mark.parametrize(("length", "ratio"), [(4096, 0.913), (32768, 1.746), (131072, 2.829)])
def test_error_of_counting_every_layer_as_softmax_attention(length, ratio):
    right = model_flops(describe_model(QWEN3_5_35B).shape, [length]).train / length
    assert _slime_train_flops_per_token(length) / right == pytest.approx(ratio, abs=1e-3)


# NVIDIA-NeMo/Megatron-Bridge pull request 3839: TFLOPS before and after, packs of 2048 and 4096 tokens.
@pytest.mark.parametrize(("pack_tokens", "before", "after"), [(2048, 162.6, 155.8), (4096, 339.9, 156.7)])
def test_packs_with_2030_real_tokens_explain_both_rows_of_the_bridge_table(pack_tokens, before, after):
    """Quadratic work is at most 8 % here: 2.17x can only come from counting the empty half of the pack."""
    shape = describe_model(QWEN3_8B).shape
    ends = [*range(0, 2030, 254), 2030]
    real = model_flops(shape, batch_lengths(1, pack_tokens, cu_seqlens=[ends]))
    configured = model_flops(shape, [pack_tokens])
    assert configured.train / real.train == pytest.approx(before / after, rel=2e-3)


def test_no_division_of_a_full_pack_explains_the_second_row():
    shape = describe_model(QWEN3_8B).shape
    shortest_possible = model_flops(shape, [1] * 4096)
    assert model_flops(shape, [4096]).train / shortest_possible.train < 1.09


def test_attention_within_frames_not_within_the_video():
    """The patches of a video are not one sequence: 16 frames would cost 16 times too much."""
    shape = describe_model(QWEN3_5_35B).shape
    assert shape.vision is not None
    frames, as_one_image = Grid(16, 8, 8), Grid(1, 32, 32)
    assert frames.patches == as_one_image.patches
    assert 16 * shape.vision.attention_core_flops(frames) == shape.vision.attention_core_flops(as_one_image)


def test_rates_need_time_and_devices():
    with pytest.raises(ValueError, match="no rate over 0 seconds"):
        tflops_per_gpu(1, 0, 1)


def test_the_readme_shows_what_the_script_computes():
    (row,) = [line for line in (PROJECT / "README.md").read_text().splitlines() if line.startswith("| reported over")]
    computed = {name: field_flops.cell(values) for name, values in field_flops.ratios().items()}
    expected = ["1 and 1", computed["slime"], computed["verl"], "raises", computed["prime-rl"], "raises"]
    assert [one.strip() for one in row.split("|")[2:-1]] == expected
