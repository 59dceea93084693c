"""Bad input ends with one clear sentence and exit code 2, without a traceback, before anything is started."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from forked_command import run_forked
from safetensors.torch import load_file, save_file

_PROJECT = Path(__file__).parents[2]
_GSM8K = _PROJECT / "tests/gsm8k_rows"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small valid configuration, its data and its policy."""
    folder = tmp_path_factory.mktemp("made")
    rows = [{"prompt": f"{i}+1=?", "label": str(i + 1)} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "r", "iterations": 1, "directory": str(folder / "runs")},
        "model": {"path": str(folder / "policy")},
        "prepare": {"policy": {"layers": 1, "hidden_size": 32, "heads": 2, "key_value_heads": 1, "head_dim": 16}},
        "data": {"train": [{"name": "t", "path": str(folder / "train.jsonl")}], "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 64, "prompts_per_iteration": 2},
    }
    (folder / "good.yaml").write_text(yaml.safe_dump(config))
    assert run_forked(folder, "train", str(folder / "good.yaml"), "--dry-run").returncode == 0
    return folder


@pytest.fixture
def good(made, tmp_path_factory):
    """A copy of them that a test may spoil."""
    folder = tmp_path_factory.mktemp("good")
    shutil.copytree(made, folder, dirs_exist_ok=True)
    (folder / "good.yaml").write_text((made / "good.yaml").read_text().replace(str(made), str(folder)))
    return folder


def _write(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def _without_tokenizer(folder: Path) -> str:
    target = folder / "no_tokenizer"
    target.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((folder / "policy" / name).read_bytes())
    return str(target)


def _model_with(folder: Path, name: str, text: str) -> str:
    target = folder / f"with_{name}"
    shutil.copytree(folder / "policy", target, dirs_exist_ok=True)
    (target / name).write_text(text)
    return str(target)


def _model(folder: Path, name: str, **changes) -> str:
    """A copy of the policy whose configurations say something else."""
    target = folder / name
    shutil.copytree(folder / "policy", target, dirs_exist_ok=True)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    if "eos_token_id" in changes:
        (target / "generation_config.json").unlink()
    return f"model.path={target}"


def _sharded(folder: Path, name: str, damage) -> Path:
    """A copy of the policy in two files with an index; `damage` gets the path of the second."""
    target = folder / name
    shutil.copytree(folder / "policy", target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    files = {tensor: f"{index % 2}.safetensors" for index, tensor in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({tensor: tensors[tensor] for tensor in files if files[tensor] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    damage(target / "1.safetensors")
    return target


def _quantized(folder: Path) -> Path:
    target = folder / "quantized"
    shutil.copytree(folder / "policy", target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    gate = "model.layers.0.mlp.gate_proj.weight"
    save_file(tensors | {gate: tensors[gate].to(torch.int8)}, target / "model.safetensors")
    return target


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _replaced_by_a_copy(path: Path) -> None:
    shutil.copy(path.with_name("0.safetensors"), path)


_GIANT = ("prepare.policy.hidden_size=1048576", "prepare.policy.intermediate_size=1048576")
_CASES = {
    "missing file": (lambda f: (f / "nowhere.yaml", []), "nowhere.yaml: no such file"),
    "malformed YAML": (lambda f: (_write(f, "bad.yaml", "run: {name: a\n"), []), "not valid YAML"),
    "unknown key": (lambda f: (f / "good.yaml", ["rollout.engins=2"]), "did you mean 'rollout.engines'?"),
    "wrong type": (lambda f: (f / "good.yaml", ["run.iterations=many"]), "run.iterations: input should be a valid int"),
    "data missing": (lambda f: (f / "good.yaml", [_data(f, "none.jsonl")]), "none.jsonl: no such file"),
    "label missing": (
        lambda f: (f / "good.yaml", [_data(f, _write(f, "l.jsonl", '{"prompt": "x"}\n').name)]),
        "l.jsonl:1: column 'label'",
    ),
    "prompts too long": (
        lambda f: (f / "good.yaml", ["data.max_prompt_tokens=3"]),
        "longer than data.max_prompt_tokens",
    ),
    "argument of no chat template": (
        lambda f: (f / "good.yaml", ["data.chat_template_arguments.enable_thinking=false"]),
        "the chat template of",
    ),
    "budget too small": (
        lambda f: (f / "good.yaml", ["actor.max_tokens_per_gpu=100"]),
        "more than the pack budget actor.max_tokens_per_gpu",
    ),
    "no tokenizer": (
        lambda f: (f / "good.yaml", [f"model.path={_without_tokenizer(f)}"]),
        "no tokenizer in this model folder",
    ),
    "no model": (
        lambda f: (f / "good.yaml", [f"model.path={f}", "prepare.policy=null"]),
        "no config.json in this model",
    ),
    "a layout that does not divide the policy": (
        lambda f: (f / "good.yaml", ["actor.processes=2", "actor.parallel.pipeline=2"]),
        "num_hidden_layers = 1 of Qwen3ForCausalLM does not divide by actor.parallel.pipeline",
    ),
    "frozen parameters that are not there, in a dry run": (
        lambda f: (f / "good.yaml", ["actor.frozen_parameters=[vision]", "--dry-run"]),
        "actor.frozen_parameters has 'vision', which matches no parameter",
    ),
    "an architecture that the actor cannot train": (
        lambda f: (f / "good.yaml", [_model(f, "mixtral", architectures=["MixtralForCausalLM"]), "--dry-run"]),
        "architecture 'MixtralForCausalLM' is not supported",
    ),
    "an argument that SGLang lacks": (
        lambda f: (f / "good.yaml", ["rollout.engine.sglang={mem_fraction: 0.5}", "--dry-run"]),
        "rollout.engine.sglang.mem_fraction: SGLang has no such argument; did you mean 'mem_fraction_static'?",
    ),
    "a context too short for prompt and response": (
        lambda f: (f / "good.yaml", [_model(f, "short", max_position_embeddings=129), "--dry-run"]),
        "is 128 tokens, and SGLang keeps 2 more, but max_position_embeddings of",
    ),
    "a context longer than the model's": (
        lambda f: (f / "good.yaml", ["rollout.engine.context_tokens=5000", "--dry-run"]),
        "rollout.engine.context_tokens is 5000, but",
    ),
    "recomputation of what does not exist": (
        lambda f: (f / "good.yaml", ["actor.recompute={granularity: selective, modules: [norms]}", "--dry-run"]),
        "actor.recompute.modules.0: input should be 'core_attn', 'mlp', 'moe' or 'shared_experts'",
    ),
    "a loss that cannot be imported": (
        lambda f: (f / "good.yaml", ["algorithm.loss=no.such:loss", "--dry-run"]),
        "algorithm.loss 'no.such:loss': cannot import 'no.such'",
    ),
    "a loss of other arguments": (
        lambda f: (f / "good.yaml", ["algorithm.loss=json:dumps", "--dry-run"]),
        "algorithm.loss 'json:dumps' is not a function of (inputs, config)",
    ),
    "an advantage that cannot be imported": (
        lambda f: (f / "good.yaml", ["algorithm.advantage=no.such:one", "--dry-run"]),
        "algorithm.advantage 'no.such:one': cannot import 'no.such'",
    ),
    "routes of a model without experts": (
        lambda f: (f / "good.yaml", ["algorithm.routing_replay=true", "--dry-run"]),
        "algorithm.routing_replay is set, but model type 'qwen3' has no experts",
    ),
    "shapes unlike config.json": (
        lambda f: (f / "good.yaml", [_model(f, "wide", intermediate_size=50), "--dry-run"]),
        "do not fit its config.json: model.layers.0.mlp.gate_proj.weight has shape",
    ),
    "weights of another type": (
        lambda f: (f / "good.yaml", [f"model.path={_quantized(f)}", "--dry-run"]),
        "model.layers.0.mlp.gate_proj.weight has values of type I8, which are no plain floating-point numbers",
    ),
    "an engine's layout that does not divide the policy": (
        lambda f: (f / "good.yaml", ["actor.processes=4", "rollout.engine.tensor_parallel=4", "--dry-run"]),
        "num_attention_heads = 2 of Qwen3ForCausalLM does not divide by rollout.engine.tensor_parallel = 4",
    ),
    "a tokenizer larger than the vocabulary": (
        lambda f: (f / "good.yaml", [_model(f, "few_rows", vocab_size=257), "--dry-run"]),
        ", but config.json gives the model 257 rows (vocab_size)",
    ),
    "more layers than any model has": (
        lambda f: (f / "good.yaml", [_model(f, "tower", num_hidden_layers=10**9), "--dry-run"]),
        "'num_hidden_layers' is 1000000000: no model has more than 10,000",
    ),
    "an end token of text": (
        lambda f: (
            f / "good.yaml",
            [f"model.path={_model_with(f, 'generation_config.json', json.dumps({'eos_token_id': 'x'}))}", "--dry-run"],
        ),
        "'eos_token_id' is 'x', expected a token id or a list of them",
    ),
    "no end token": (
        lambda f: (f / "good.yaml", [_model(f, "endless", eos_token_id=None), "--dry-run"]),
        "no end token of the vocabulary in config.json or generation_config.json",
    ),
    "an empty file of weights": (
        lambda f: (f / "good.yaml", [f"model.path={_sharded(f, 'empty', _emptied)}", "--dry-run"]),
        "1.safetensors is not a readable safetensors file",
    ),
    "a file of weights that is cut": (
        lambda f: (f / "good.yaml", [f"model.path={_sharded(f, 'cut', _cut)}", "--dry-run"]),
        "1.safetensors is not a readable safetensors file",
    ),
    "a file of weights that is not there": (
        lambda f: (f / "good.yaml", [f"model.path={_sharded(f, 'absent', Path.unlink)}", "--dry-run"]),
        "1.safetensors, which does not exist",
    ),
    "weights in another file than the index says": (
        lambda f: (f / "good.yaml", [f"model.path={_sharded(f, 'moved', _replaced_by_a_copy)}", "--dry-run"]),
        "which the index says it holds",
    ),
    "weights that are none": (
        lambda f: (f / "good.yaml", [f"model.path={_model_with(f, 'model.safetensors', 'x')}"]),
        "model.safetensors is not a readable safetensors file",
    ),
    "a damaged generation_config.json": (
        lambda f: (f / "good.yaml", [f"model.path={_model_with(f, 'generation_config.json', '[')}"]),
        "generation_config.json is not valid JSON",
    ),
    "a nested config.json": (
        lambda f: (f / "good.yaml", [f"model.path={_model_with(f, 'config.json', '[' * 9999)}"]),
        "config.json is not valid JSON",
    ),
    "evaluation on training rows": (
        lambda f: (f / "good.yaml", [f"eval.datasets=[{{name: e, path: {f / 'train.jsonl'}, rows: '0:3'}}]"]),
        "evaluation set 'e': all its 3 prompts are training prompts too",
    ),
    "a row without its answer": (
        lambda f: (f / "good.yaml", ["warm_start={steps: 1, response_template: '{solution}'}"]),
        "the template '{solution}' cannot be filled",
    ),
    "a row that names an unknown grader": (
        lambda f: (f / "good.yaml", ["reward.column=label"]),
        "column 'label' names the grader '1'",
    ),
    "a name that is a path": (
        lambda f: (f / "good.yaml", ["run.name=../../x", "--overwrite"]),
        "run.name: the name is",
    ),
    "a path that is too long": (
        lambda f: (f / "good.yaml", [f"model.path={'m' * 300}", "prepare.policy=null"]),
        "File name too long",
    ),
    "a grader's module with a syntax error": (
        lambda f: (f / "good.yaml", [f"reward.name={_module(f, 'def f(:')}:f"]),
        "failed with SyntaxError at line 1",
    ),
    "a configuration without an end": (
        lambda f: (Path("/dev/zero"), []),
        "/dev/zero: is a device, and a file is needed",
    ),
    "a policy in the folder above": (
        lambda f: (f / "good.yaml", ["model.path=..", "--dry-run"]),
        "model.path is '..', which holds something, but no policy",
    ),
    "a policy where other files are": (
        lambda f: (f / "good.yaml", [f"model.path={_write(f, 'taken/x', '').parent}", "--dry-run"]),
        "/taken', which holds something, but no policy",
    ),
    "a cache too small for one sequence": (
        lambda f: (f / "good.yaml", ["rollout.engine.kv_cache_tokens=129", "--dry-run"]),
        "rollout.engine.kv_cache_tokens is 129, too few for one sequence of up to 128 tokens",
    ),
    "a stop token outside the vocabulary": (
        lambda f: (f / "good.yaml", ["rollout.sampling.stop_token_ids=[320]", "--dry-run"]),
        "sampling.stop_token_ids has 320, which no response can contain",
    ),
    "unknown grader": (lambda f: (f / "good.yaml", ["reward.name=mathh"]), "mathh"),
    "nothing to resume": (lambda f: (f / "good.yaml", ["--resume"]), "no complete checkpoint to resume from"),
    "a run of that name": (
        lambda f: (f / "good.yaml", [f"run.name={_a_run(f)}"]),
        "already holds a run: continue it with --resume, replace it with --overwrite",
    ),
    "an address that is none": (
        lambda f: (f / "good.yaml", ["ray.address=foo", "--dry-run"]),
        "ray.address: the address is 'foo': give host:port of a Ray head, or auto on one of its nodes",
    ),
    "more engines than there can be": (
        lambda f: (f / "good.yaml", ["rollout.engines=100000", "--dry-run"]),
        "without ray.address all of them start on this machine",
    ),
    "a policy to prepare that no machine holds": (
        lambda f: (f / "good.yaml", [f"model.path={f}/giant", *_GIANT, "--dry-run"]),
        "billion parameters in float32, more than can be made in the",
    ),
    "a pipe in a model folder": (
        lambda f: (f / "good.yaml", [f"model.path={_with_a_pipe(f)}", "--dry-run"]),
        "/chat_template.jinja: is a pipe, and a file is needed there",
    ),
    "runs in the place of a file": (
        lambda f: (f / "good.yaml", [f"run.directory={f}/train.jsonl/runs", "--dry-run"]),
        "train.jsonl/runs (Not a directory); choose another folder",
    ),
    "runs where nobody can write": (
        lambda f: (f / "good.yaml", ["run.directory=/proc/runs", "--dry-run"]),
        "run.directory: runs cannot be written into /proc/runs (No such file or directory)",
    ),
    "data to prepare where nobody can write": (
        lambda f: (f / "good.yaml", ["prepare={arithmetic: {digits: 2}, directory: /proc/task}", "--dry-run"]),
        "/proc/task: No such file or directory; correct the path",
    ),
    "a link to a file that is not there": (
        lambda f: (f / "good.yaml", [f"model.path={_with_a_broken_link(f)}", "--dry-run"]),
        "/chat_template.jinja: is a link to a file that is not there",
    ),
    "a tokenizer whose library panics": (
        lambda f: (f / "good.yaml", [f"model.path={_with_a_panic(f)}", "--dry-run"]),
        "no tokenizer can be loaded from this model folder: no entry found for key",
    ),
    "no cluster": (
        lambda f: (f / "good.yaml", ["ray.address=127.0.0.1:1", "--overwrite"]),
        "ray: no cluster at 127.0.0.1:1",
    ),
}


def _with_a_broken_link(folder: Path) -> Path:
    target = folder / "with_a_broken_link"
    shutil.copytree(folder / "policy", target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    (target / "chat_template.jinja").symlink_to("../blobs/gone")
    return target


def _with_a_panic(folder: Path) -> Path:
    """Its template of special tokens names one that it does not hold."""
    tokenizer = json.loads((folder / "policy" / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}]
    wrong = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    return Path(_model_with(folder, "tokenizer.json", json.dumps(tokenizer | {"post_processor": wrong})))


def _with_a_pipe(folder: Path) -> Path:
    target = folder / "with_a_pipe"
    shutil.copytree(folder / "policy", target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(target / "chat_template.jinja")
    return target


def _module(folder: Path, text: str) -> str:
    """Beside the forked process, whose folder is importable."""
    sys.path.insert(0, str(folder))
    return _write(folder, "broken_grader.py", text).stem


def _a_run(folder: Path) -> str:
    run = folder / "runs" / "begun"
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").touch()
    return run.name


def _data(folder: Path, name: str) -> str:
    return f"data.train=[{{name: t, path: {folder / name}}}]"


@pytest.mark.parametrize("case", _CASES)
def test_bad_input_is_one_sentence(good, case, tmp_path):
    arrange, expected = _CASES[case]
    config, arguments = arrange(good)
    result = run_forked(tmp_path, "train", str(config), *arguments)
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(sentence) < 600


def test_a_disk_that_is_full_before_anything_is_made_is_one_sentence(good, tmp_path):
    result = run_forked(tmp_path, "train", str(good / "good.yaml"), f"model.path={tmp_path}/p", largest_file_bytes=4096)
    assert result.returncode == 2, result.stderr
    assert f"error: {tmp_path}: cannot be written to (File too large): free space there" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


def test_gsm8k_goes_through_the_configuration_of_its_own(good, tmp_path):
    rows = [
        f"{{name: g, path: {_GSM8K}, split: {split}, prompt_column: question, label_column: answer}}"
        for split in ("train", "test")
    ]
    places = [
        f"data.train=[{rows[0]}]",
        f"eval.datasets=[{rows[1]}]",
        f"model.path={good}/policy",
        f"prepare.directory={good}",
    ]
    result = run_forked(tmp_path, "train", str(_PROJECT / "configs/demo/gsm8k.yaml"), *places, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "from 16 training prompts; evaluation prompts: g 4" in result.stdout


def test_rows_are_read_as_the_data_section_says(good, tmp_path):
    rows = (good / "train.jsonl").read_text()
    long = json.dumps({"prompt": "1+" * 40 + "1=?", "label": "41"})
    many = rows * (6000 // rows.count("\n"))  # few are kept in memory alone
    (good / "train.jsonl").write_text(f"{many}{long}\n{{}}\n")
    settings = ["data.skip_bad_rows=true", "data.max_prompt_tokens=70", f"data.cache_directory={tmp_path}/cache"]
    result = run_forked(tmp_path, "train", str(good / "good.yaml"), *settings, "data.processes=1", "--dry-run")
    assert result.returncode == 0, result.stderr
    counts = f"of {many.count(chr(10)) + 2} rows 1 are too long and 1 are skipped, the first of those for: "
    assert f"the training data: {counts}" in result.stdout
    assert list((tmp_path / "cache").glob("*"))


def test_an_evaluation_on_training_rows_that_is_allowed_is_told(good, tmp_path):
    rows = f"eval.datasets=[{{name: e, path: {good / 'train.jsonl'}, rows: '0:3'}}]"
    result = run_forked(tmp_path, "train", str(good / "good.yaml"), rows, "eval.allow_training_rows=true", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "evaluation set e: 3 of 3 prompts are training prompts too" in result.stdout


def test_debug_shows_the_traceback(good, tmp_path):
    result = run_forked(tmp_path, "train", str(good / "nowhere.yaml"), "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr
