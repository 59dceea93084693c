"""FP8 engines: what is refused, what SGLang is told, and what it saves."""

import json
from pathlib import Path

import pytest
from engine_worker import answer_of

from rlpipe.config.rollout import EngineConfig
from rlpipe.estimate.engine_pools import needed_pools
from rlpipe.estimate.parameters import fp8_parameters, model_parameters
from rlpipe.model.fp8_checks import check_fp8
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import ConfigError, ModelError
from rollout.arguments import EngineSetup, server_arguments
from rollout.device_checks import check_device
from rollout.sglang_source import declared_server_arguments

HYBRID = describe_model("Qwen3.5-35B-A3B")
STAND_INS = Path(server_arguments.__code__.co_filename).parent / "cpu_stand_ins"
CHOOSE = """
import json

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from rlpipe.shared.errors import RolloutError
from rollout.sglang_patches.fp8_model import _by_rule

def chosen(kind, prefix, quantization):
    try:
        method = _by_rule(lambda config, layer, prefix: "fp8", quantization)(None, object.__new__(kind), prefix)
    except RolloutError as error:
        return str(error)
    return method if isinstance(method, str) else type(method).__name__

modules = (
    (FusedMoE, "mlp.experts"),
    (FusedMoE, "block_sparse_moe.experts"),
    (LinearBase, "mlp.shared_expert.down_proj"),
    (LinearBase, "linear_attn.out_proj"),
)
every = [
    chosen(kind, f"model.layers.0.{module}", quantization)
    for quantization in ("fp8", "fp8_all")
    for kind, module in modules
]
print(json.dumps(every))
"""


def arguments_of(**engine) -> dict:
    setup = EngineSetup(0, "/model", "cuda", EngineConfig(**engine), 100, False, False, 0, "name", "/log")
    return server_arguments(setup, declared_server_arguments())


def test_sglang_takes_the_folder_for_one_that_is_stored_by_blocks():
    plain, fp8 = arguments_of(), arguments_of(quantization="fp8_all", kv_cache_dtype="fp8")
    assert not {"json_model_override_args", "kv_cache_dtype"} & set(plain)
    stored = json.loads(fp8["json_model_override_args"])["quantization_config"]
    assert stored["quant_method"] == "fp8" and stored["weight_block_size"] == [128, 128]
    assert fp8["kv_cache_dtype"] == "fp8_e4m3"
    assert fp8["fp8_gemm_runner_backend"] == "triton"
    chosen = arguments_of(quantization="fp8_all", sglang={"fp8_gemm_runner_backend": "deep_gemm"})
    assert chosen["fp8_gemm_runner_backend"] == "deep_gemm"
    assert set(fp8) <= set(declared_server_arguments())


def test_a_shared_expert_stays_beside_experts_in_8_bits():
    alone = arguments_of(quantization="fp8")
    assert (
        alone["disable_shared_experts_fusion"]
        and not arguments_of(quantization="fp8_all")["disable_shared_experts_fusion"]
    )


def test_what_cannot_be_quantized_is_refused():
    for name in ("Qwen3.5-35B-A3B", "Qwen3-30B-A3B", "Qwen3-8B", "Qwen3.5-9B"):
        check_fp8(describe_model(name), "fp8_all", 1)
    check_fp8(HYBRID, "fp8_all", 4)
    check_fp8(HYBRID, "fp8", 4)
    check_fp8(HYBRID, "fp8", 8, expert=2)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no experts, by which 8 bits save time"):
        check_fp8(describe_model("Qwen3-8B"), "fp8", 1)
    with pytest.raises(ModelError, match="moe_intermediate_size .* gives 64 on a rank"):
        check_fp8(HYBRID, "fp8", 8)
    with pytest.raises(ModelError, match="shared_expert_intermediate_size .* gives 64 on a rank"):
        check_fp8(HYBRID, "fp8_all", 8, expert=8)
    with pytest.raises(ConfigError, match=r"quantization is 'fp8', for which a CPU engine has no kernels"):
        check_device("cpu", EngineConfig(quantization="fp8"))
    check_device("cuda", EngineConfig(quantization="fp8"))
    with pytest.raises(ValueError, match="go with 'bfloat16'"):
        EngineConfig(quantization="fp8", dtype="float32")
    with pytest.raises(ValueError, match="json_model_override_args is there"):
        EngineConfig(quantization="fp8", sglang={"json_model_override_args": "{}"})


def test_most_weights_and_half_of_the_pool_are_saved():
    total = model_parameters(HYBRID.shape, HYBRID.tied_embeddings).total
    assert 0.9 < fp8_parameters(HYBRID.shape, "fp8") / total < fp8_parameters(HYBRID.shape, "fp8_all") / total < 0.97
    assert fp8_parameters(HYBRID.shape, "none") == 0
    plain, small = (
        needed_pools(HYBRID.shape, EngineConfig(kv_cache_dtype=dtype), "", 9, 100) for dtype in ("auto", "fp8")
    )
    assert small.token_bytes * 2 == plain.token_bytes and small.state_bytes == plain.state_bytes


def test_modules_get_8_bits_by_the_rule_that_quantises_their_tensors(tmp_path):
    worker = tmp_path / "choose.py"
    worker.write_text(CHOOSE)
    experts, named_otherwise, shared, mixer, *of_all = answer_of(worker, tmp_path)
    assert "the model keeps experts as 'model.layers.0.block_sparse_moe.experts'" in named_otherwise
    assert (experts, shared, mixer) == ("fp8", "UnquantizedLinearMethod", "UnquantizedLinearMethod")
    assert of_all == ["fp8", named_otherwise.replace("'fp8'", "'fp8_all'"), "fp8", "UnquantizedLinearMethod"]
