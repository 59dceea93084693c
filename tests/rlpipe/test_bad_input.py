"""Bad input ends with one clear sentence and exit code 2, without a traceback, before anything is started."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from forked_command import run_forked

_PROJECT = Path(__file__).parents[2]
_GSM8K = _PROJECT / "tests/gsm8k_rows"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A small valid configuration, its data and its policy."""
    folder = tmp_path_factory.mktemp("good")
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


def _write(folder: Path, name: str, text: str) -> Path:
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
        "config.json cannot be read as JSON",
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
    "unknown grader": (lambda f: (f / "good.yaml", ["reward.name=mathh"]), "mathh"),
    "nothing to resume": (lambda f: (f / "good.yaml", ["--resume"]), "no complete checkpoint to resume from"),
    "a run of that name": (
        lambda f: (f / "good.yaml", [f"run.name={_a_run(f)}"]),
        "already holds a run: continue it with --resume, replace it with --overwrite",
    ),
    "no cluster": (
        lambda f: (f / "good.yaml", ["ray.address=127.0.0.1:1", "--overwrite"]),
        "ray: no cluster at 127.0.0.1:1",
    ),
}


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
    assert "from 16 training prompts (0 too long, 0 bad rows skipped); evaluation prompts: g 4" in result.stdout


def test_debug_shows_the_traceback(good, tmp_path):
    result = run_forked(tmp_path, "train", str(good / "nowhere.yaml"), "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr
