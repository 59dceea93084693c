"""A checkpoint of any layout becomes the very folder that the live policy writes, in one process on a CPU."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from chosen_cases import chosen
from model_support import GDN_MOE, add_mtp, read_tensors, wrap_in_vision_language, write_checkpoint
from train_support import in_module_worker, run_processes, write_policy

from rlpipe.shared.checkpoint_folder import checkpoint_path
from rlpipe.shared.policy_facts import PolicyFacts
from tests.slow_cases import slow

LAYOUTS = {
    "dense": {"pipeline": 2, "virtual_pipeline": 2},
    "tied": {"tensor": 2},
    "moe": {"tensor": 2, "sequence": True, "expert": 2},
    "wrapped": {"expert": 2},
    "wrapped_mtp": {"pipeline": 2},
}
DTYPES = {"tied": "bfloat16"}
# What vLLM's loaders of these architectures take, by name; q, k, v and gate, up are stacked when they are loaded.
_LAYER = (
    r"(?:input_layernorm|post_attention_layernorm|self_attn\.(?:[qkvo]_proj|[qk]_norm)|mlp\.(?:gate|up|down)_proj"
    r"|mlp\.gate|mlp\.shared_expert_gate|mlp\.shared_expert\.(?:gate|up|down)_proj"
    r"|mlp\.experts\.\d+\.(?:gate|up|down)_proj|linear_attn\.(?:in_proj_(?:qkv|z|b|a)|conv1d|norm|out_proj))\.weight"
    r"|linear_attn\.(?:A_log|dt_bias)|mlp\.experts\.(?:gate_up_proj|down_proj)"
)
_VLLM = {
    "Qwen3ForCausalLM": rf"(?:model\.(?:embed_tokens|norm|layers\.\d+\.(?:{_LAYER}))|lm_head)(?:\.weight)?",
    "Qwen3_5MoeForConditionalGeneration": (
        rf"model\.language_model\.(?:embed_tokens\.weight|norm\.weight|layers\.\d+\.(?:{_LAYER}))|lm_head\.weight"
        rf"|model\.visual\..*|mtp\.(?:fc|norm|pre_fc_norm_(?:embedding|hidden))\.weight|mtp\.layers\.0\.(?:{_LAYER})"
    ),
}
_VLLM["Qwen3MoeForCausalLM"] = _VLLM["Qwen3ForCausalLM"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    found = {name: write_policy(folder, name) for name in ("dense", "tied", "moe")}
    hybrid = write_checkpoint(GDN_MOE, folder)
    found["wrapped"] = wrap_in_vision_language(add_mtp(hybrid, folder / "mtp"), folder / "wrapped")
    found["wrapped_mtp"] = found["wrapped"]
    (found["dense"] / "additional_chat_templates").mkdir()
    (found["dense"] / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (found["dense"] / "README.md").write_text("---\nlicense: apache-2.0\n---\nAnother model\n")
    return found


@pytest.fixture(scope="module")
def saved(sources, tmp_path_factory, request):
    """Checkpoint, live policy and export of each case."""
    folder, wanted = tmp_path_factory.mktemp("saved"), chosen(request, "case")
    cases = {
        name: (
            sources[name],
            {"parallel": layout, "train_mtp": name == "wrapped_mtp", "dtype": DTYPES.get(name, "float32")},
        )
        for name, layout in LAYOUTS.items()
        if (name,) in wanted
    }
    run_processes(2, in_module_worker, "checkpoint_workers", "save_for_export", cases, folder)
    code = ["from pathlib import Path", "from actor.checkpoint_policy import export_checkpoint"]
    code += ["from rlpipe.config.actor import ActorConfig", "from rlpipe.shared.policy_facts import PolicyFacts"]
    for name, (source, options) in cases.items():
        actor = {"processes": 2, "gdn_backend": "auto", **options}
        code.append(
            f"export_checkpoint(Path({str(checkpoint_path(folder / name, 2))!r}), Path({str(folder / name / 'out')!r}),"
            f" Path({str(source)!r}), ActorConfig.model_validate({actor!r}),"
            f" PolicyFacts('r', 2, {{'eval/a/accuracy': 0.5}}, 'card'))"
        )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", "\n".join(code)], env=environment, check=True)
    return folder


@pytest.mark.parametrize("case", ["dense", "wrapped_mtp", *slow(["tied", "moe", "wrapped"])])
def test_an_export_has_the_bits_of_the_live_policy(saved, sources, case):
    live, exported, source = (
        read_tensors(path) for path in (saved / case / "live", saved / case / "out", sources[case])
    )
    assert exported.keys() == live.keys() == source.keys()
    assert all(torch.equal(exported[name], live[name]) for name in live)
    trained = [name for name in live if not torch.equal(live[name], source[name])]
    assert trained and not any(name.startswith("model.visual.") for name in trained)
    assert any(name.startswith("mtp.") for name in trained) == (case == "wrapped_mtp")


@pytest.mark.parametrize("case", ["dense", "wrapped_mtp", *slow(["moe"])])
def test_names_are_those_that_vllm_loads(saved, case):
    (architecture,) = json.loads((saved / case / "out/config.json").read_text())["architectures"]
    names = read_tensors(saved / case / "out")
    assert [name for name in names if not re.fullmatch(_VLLM[architecture], name)] == []


@pytest.mark.parametrize("case", ["wrapped_mtp", *slow(["tied", "moe"])])
def test_transformers_finds_every_weight(saved, case):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    folder = saved / case / "out"
    wrapped = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    _, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in report["unexpected_keys"])


@pytest.mark.parametrize("case", ["dense"])
def test_what_belongs_to_a_model_goes_with_it(saved, case):
    folder = saved / case / "out"
    assert (folder / "additional_chat_templates/tools.jinja").read_text() == "{{ tools }}"
    assert (folder / "generation_config.json").exists()
    assert (folder / "README.md").read_text() == "card"
    assert PolicyFacts.read(folder) == PolicyFacts("r", 2, {"eval/a/accuracy": 0.5}, "card")
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}
    assert set(modes.values()) == {modes["config.json"]}
    assert not [path for path in (saved / case).iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("case", ["wrapped_mtp", *slow(["tied"])])
def test_config_tells_the_dtype_of_the_weights(saved, case):
    dtype = DTYPES.get(case, "float32")
    config = json.loads((saved / case / "out/config.json").read_text())
    assert config.get("dtype", config.get("text_config", {}).get("dtype")) == dtype
    tensors = read_tensors(saved / case / "out")
    assert {str(tensor.dtype) for name, tensor in tensors.items()} == {f"torch.{dtype}"}
