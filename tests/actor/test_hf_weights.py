"""Hugging Face weights: exact both ways in every layout, read about once by all processes together, or refused."""

import json
import shutil

import pytest
import torch
from chosen_cases import chosen
from model_support import (
    DENSE,
    EXPERTS,
    GDN_MOE,
    HYBRID,
    SHARED,
    TinyModel,
    add_mtp,
    fuse_experts,
    in_worker,
    read_tensors,
    wrap_in_vision_language,
    write_checkpoint,
    write_tensors,
)
from tensor_bits import bits
from train_support import run_processes

from actor.hf.safetensors_reader import fill_shard
from actor.hf.weight_table import PADDING, Entry, Piece, Source, export_plan
from rlpipe.model.model_reader import trainable_model

TIED = TinyModel("tied", "qwen3", {"tie_word_embeddings": True})
QWEN2 = TinyModel("qwen2", "qwen2", {"head_dim": None, "num_attention_heads": 6})
NEXT = TinyModel("next", "qwen3_next", HYBRID | EXPERTS | SHARED)
TP2_EP2 = {"parallel": {"tensor": 2, "sequence": True, "expert": 2}}
LAYOUTS = {
    "tp2": ({"parallel": {"tensor": 2}}, ("tied", "qwen2")),
    "tp2_ep2": (TP2_EP2, ("gdn_moe", "next", "fused", "wrapped")),
    "pp2": ({"parallel": {"pipeline": 2}}, ("tied", "gdn_moe")),
    "ep2_dp2": ({"parallel": {"expert": 2}}, ("next", "gdn_moe")),
    "dp2": ({}, ("dense",)),
    "pp2_vpp2": ({"parallel": {"pipeline": 2, "virtual_pipeline": 2}}, ("dense",)),
    "cp2_ep2": ({"parallel": {"context": 2, "expert": 2}}, ("gdn_moe",)),
    "pp2_mtp": ({"parallel": {"pipeline": 2}, "train_mtp": True}, ("mtp",)),
    "pp2_carried_mtp": ({"parallel": {"pipeline": 2}}, ("mtp",)),
}
SLOW = {"pp2", "ep2_dp2", "dp2", "pp2_carried_mtp"}
CASES = [
    pytest.param(model, layout, marks=pytest.mark.slow if layout in SLOW else ())
    for layout, (_, models) in LAYOUTS.items()
    for model in models
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("weights")
    found = {model.name: write_checkpoint(model, folder) for model in (DENSE, TIED, QWEN2, NEXT, GDN_MOE)}
    found["fused"] = write_tensors(found["gdn_moe"], folder / "fused", fuse_experts(read_tensors(found["gdn_moe"])))
    found["wrapped"] = wrap_in_vision_language(found["gdn_moe"], folder / "wrapped")
    found["mtp"] = add_mtp(found["gdn_moe"], folder / "mtp")
    return found


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def results(paths, output, request):
    cases = chosen(request, "model", "layout")
    work = {
        name: (options, {model: paths[model] for model in models if (model, name) in cases})
        for name, (options, models) in LAYOUTS.items()
    }
    return [exchanged for (exchanged,) in run_processes(2, in_worker, ("exchange_weights", work, output))]


@pytest.mark.slow
def test_a_megatron_checkpoint_of_a_hybrid_loads_in_any_other_layout(paths, tmp_path):
    layouts = [TP2_EP2["parallel"], {"pipeline": 2}, {"context": 2, "expert": 2}, {"tensor": 2, "sequence": True}]
    answers = run_processes(2, in_worker, ("reshard", paths["mtp"], tmp_path, layouts))
    assert [changed for (changed,) in answers] == [[[], [], []]] * 2


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_was_loaded_streams_out_unchanged(results, paths, model, layout):
    left_alone = ("model.visual.",) if layout == "pp2_mtp" else ("model.visual.", "mtp.")
    stored = {name: tensor for name, tensor in read_tensors(paths[model]).items() if not name.startswith(left_alone)}
    for rank, answer in enumerate(results):
        assert not isinstance(answer[model, layout], str), answer[model, layout]
        _, exported, held, sends_the_same = answer[model, layout]
        assert exported == bits(stored)
        assert held == (list(exported) if rank == 0 else [])
        assert sends_the_same


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_processes_together_read_the_checkpoint_about_once(results, paths, model, layout):
    read = sum(answer[model, layout][0] for answer in results)
    wanted = [tensor for name, tensor in read_tensors(paths[model]).items() if name in results[0][model, layout][1]]
    size = sum(tensor.numel() * tensor.element_size() for tensor in wanted)
    assert size <= read <= 1.2 * size


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_saved_folder_holds_the_same_model(results, paths, output, model, layout):
    saved, original = read_tensors(output / layout / model), read_tensors(paths[model])
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    assert json.loads((output / layout / model / "config.json").read_text())["architectures"]


@pytest.mark.parametrize(("model", "layout"), [("gdn_moe", "tp2_ep2")])
def test_a_saved_folder_loads_in_transformers(results, output, model, layout):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(output / layout / model, dtype=torch.float32)
    assert next(loaded.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_the_plan_names_what_streams_out(results, paths, model, layout):
    plan = export_plan(trainable_model(paths[model]), "float32", with_mtp=layout == "pp2_mtp")
    assert [spec.name for spec in plan] == list(results[0][model, layout][1])
    tensors = read_tensors(paths[model])
    assert all(tuple(tensors[spec.name].shape) == spec.shape for spec in plan)


@pytest.fixture(scope="module")
def damaged(paths, tmp_path_factory: pytest.TempPathFactory):
    folder, source = tmp_path_factory.mktemp("damaged"), paths["dense"]
    tensors = read_tensors(source)
    name = "model.layers.2.mlp.up_proj.weight"
    cases = {
        "missing": {key: value for key, value in tensors.items() if key != name},
        "extra": tensors | {"model.layers.2.mlp.surprise": torch.zeros(3)},
        "shape": tensors | {name: torch.zeros(7, 48)},
        "nan": tensors | {name: torch.full((64, 48), torch.nan)},
    }
    found = {case: write_tensors(source, folder / case, changed) for case, changed in cases.items()}
    found["truncated"] = folder / "truncated"
    shutil.copytree(source, found["truncated"])
    file = found["truncated"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found["empty"] = folder / "empty"
    found["empty"].mkdir()
    shutil.copy(source / "config.json", found["empty"])
    tied = read_tensors(paths["tied"])
    other = tied | {"lm_head.weight": tied["model.embed_tokens.weight"] * 2}
    found["other_head"] = write_tensors(paths["tied"], folder / "other_head", other)
    return run_processes(1, in_worker, ("load_damaged", found))[0][0]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("missing", "model.layers.2.mlp.up_proj.weight is missing"),
        ("extra", "model.layers.2.mlp.surprise is not known"),
        ("shape", "has shape [7, 48] instead of [64, 48]"),
        ("truncated", "is not a readable safetensors file"),
        ("empty", "has no *.safetensors files"),
        ("other_head", "stores an lm_head.weight unlike model.embed_tokens.weight"),
    ],
)
def test_a_damaged_folder_is_refused_and_nothing_is_loaded(damaged, case, sentence):
    message, values = damaged[case]
    assert sentence in message
    assert values == [7.0]


def test_weights_that_are_not_finite_are_refused_by_name(damaged):
    assert "model.layers.2.mlp.up_proj.weight" in damaged["nan"][0] and "not finite" in damaged["nan"][0]


def test_a_saved_folder_says_its_dtype_and_keeps_its_chat_templates(paths, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(paths["wrapped"], source)
    wrapper = json.loads((source / "config.json").read_text())
    wrapper["text_config"] |= {"dtype": "float32"}
    (source / "config.json").write_text(json.dumps(wrapper | {"torch_dtype": "float32"}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    run_processes(1, in_worker, ("save_in_bfloat16", source, tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"], "torch_dtype" in config) == ("bfloat16",) * 2 + (False,)
    assert read_tensors(tmp_path / "saved")["lm_head.weight"].dtype is torch.bfloat16
    assert (tmp_path / "saved" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_shard_is_rounded_to_the_parameter_and_padding_is_zero(axis, dtype):
    """Rank 1 of 2 of five stored rows or columns that are padded to eight."""
    stored = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    entry = Entry("head", (Source("head", (5, 5)),), axis, ((Piece(0, 0, 5), Piece(PADDING, 0, 3)),), "tensor", "last")
    parameter = torch.full((4, 5) if axis == 0 else (5, 4), torch.nan, dtype=dtype)
    fill_shard(parameter, entry, 1, 2, lambda name, axis, start, stop: stored.narrow(axis, start, stop - start))
    padding = torch.zeros((3, 5) if axis == 0 else (5, 3))
    assert torch.equal(parameter, torch.cat([stored.narrow(axis, 4, 1), padding], axis).to(dtype))
