"""Which backend Gated DeltaNet layers run on, and what is refused before anything is loaded."""

from dataclasses import replace

import pytest

from actor.early_compilation import sequence_counts
from actor.layers.gdn_backend import Machine, choose_gdn_backend
from rlpipe.model.description import GatedDeltaNetSizes
from rlpipe.shared.errors import ConfigError, ResourceError

SIZES = GatedDeltaNetSizes(16, 32, key_dim=128, value_dim=128, conv_width=4, fused_projections=False)
PACKAGES = {"fla-core": "0.6.0", "triton": "3.6.0", "flash-qla": "0.1.3", "tilelang": "0.1.11"}
HOPPER = Machine((9, 0), "2.11.0+cu130", "13.0", PACKAGES)
CPU = Machine(None, "2.13.0+cpu", None, {})


def without(name: str) -> Machine:
    return replace(HOPPER, packages={key: value for key, value in PACKAGES.items() if key != name})


def with_version(name: str, version: str) -> Machine:
    return replace(HOPPER, packages=PACKAGES | {name: version})


@pytest.mark.parametrize(
    ("requested", "machine", "backend"),
    [
        ("auto", HOPPER, "fla"),
        ("auto", CPU, "torch"),
        ("auto", without("fla-core"), "torch"),
        ("auto", replace(HOPPER, capability=(7, 5)), "torch"),
        ("torch", HOPPER, "torch"),
        ("fla", replace(HOPPER, capability=(8, 0)), "fla"),
        ("flashqla", HOPPER, "flashqla"),
        ("flashqla", replace(HOPPER, capability=(10, 3)), "flashqla"),
    ],
)
def test_the_choice_is_the_fastest_that_can_run(requested, machine, backend):
    assert choose_gdn_backend(requested, SIZES, "bfloat16", machine).backend == backend


def test_the_sentence_names_versions_and_says_why_a_slower_one_runs():
    note = choose_gdn_backend("flashqla", SIZES, "bfloat16", HOPPER).note
    assert note == "Gated DeltaNet layers run on flashqla (flash-qla 0.1.3, tilelang 0.1.11, fla-core 0.6.0)"
    slow = choose_gdn_backend("auto", SIZES, "bfloat16", without("triton")).note
    assert "plain torch, because fla cannot (it needs triton 3.3 or newer, which is not installed)" in slow
    assert choose_gdn_backend("auto", SIZES, "float32", CPU).note == "Gated DeltaNet layers run on plain torch"


@pytest.mark.parametrize(
    ("requested", "machine", "words"),
    [
        ("fla", CPU, "actor.gdn_backend = fla: it needs CUDA, which is not available"),
        ("fla", replace(HOPPER, capability=(7, 5)), "it needs SM80 or newer, and this GPU is SM75"),
        ("fla", replace(HOPPER, torch="2.6.0"), "it needs torch 2.7 or newer, and 2.6.0 is installed"),
        ("flashqla", replace(HOPPER, capability=(12, 0)), "it runs on SM90, SM100, SM103, and this GPU is SM120"),
        ("flashqla", replace(HOPPER, capability=(8, 9)), "this GPU is SM89"),
        ("flashqla", replace(HOPPER, cuda="12.6"), "it needs CUDA 12.8 or newer, and 12.6 is installed"),
        ("flashqla", without("flash-qla"), "it needs flash-qla 0.1.3 or newer, which is not installed"),
        ("flashqla", with_version("tilelang", "0.1.9"), "it needs tilelang 0.1.11 or newer, and 0.1.9 is installed"),
    ],
)
def test_a_machine_that_lacks_something_is_refused(requested, machine, words):
    with pytest.raises(ResourceError) as error:
        choose_gdn_backend(requested, SIZES, "bfloat16", machine)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("requested", "sizes", "dtype", "words"),
    [
        ("fla", SIZES, "float32", "actor.dtype is float32"),
        ("flashqla", replace(SIZES, value_dim=64), "bfloat16", "linear_key_head_dim 128 and linear_value_head_dim 64"),
        ("fla", replace(SIZES, key_dim=512), "bfloat16", "at most 256 channels, and linear_key_head_dim is 512"),
    ],
)
def test_a_model_that_does_not_suit_a_backend_is_refused(requested, sizes, dtype, words):
    with pytest.raises(ConfigError) as error:
        choose_gdn_backend(requested, sizes, dtype, HOPPER)
    assert words in str(error.value)
    assert choose_gdn_backend("auto", sizes, dtype, HOPPER).backend in ("torch", "fla")


@pytest.mark.parametrize("value_heads", [1, 2, 4, 8, 16, 32, 48, 64])
def test_packs_compiled_early_meet_every_split_of_flashqla(value_heads):
    """Its wrapper cuts value channels in one, two or four by how many blocks fill 70 % of the multiprocessors."""
    processors = 132

    def cuts(sequences: int) -> int:
        blocks, wanted = sequences * value_heads, int(0.7 * processors)
        return 1 if blocks >= wanted else 2 if 2 * blocks >= wanted else 4

    met = {cuts(count) for count in sequence_counts("flashqla", value_heads, processors)}
    assert met == {cuts(sequences) for sequences in range(1, 1000)}
    assert sequence_counts("fla", value_heads, processors) == [2]
