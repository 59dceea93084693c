"""Configuration files: composition, overrides, references, errors that name the key, secrets."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlpipe.config.load import iter_fields, load_config
from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.shared.errors import ConfigError

_MINIMAL = {
    "run": {"name": "r", "iterations": 2},
    "model": {"path": "policy"},
    "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
}


def _write(folder: Path, name: str, tree: object) -> Path:
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def test_bases_merge_key_by_key_and_later_ones_win(tmp_path):
    _write(tmp_path, "one.yaml", {**_MINIMAL, "rollout": {"engines": 2, "samples_per_prompt": 4}})
    _write(tmp_path, "two.yaml", {"rollout": {"engines": 3}})
    path = _write(tmp_path, "top.yaml", {"base": ["one.yaml", "two.yaml"], "seed": 5})
    config = load_config(path, ["rollout.samples_per_prompt=6"])
    assert (config.rollout.engines, config.rollout.samples_per_prompt, config.seed) == (3, 6, 5)


def test_an_override_reaches_into_lists(tmp_path):
    sets = [{"path": "one.jsonl", "name": "one"}, {"path": "two.jsonl", "name": "two"}]
    path = _write(tmp_path, "c.yaml", {**_MINIMAL, "data": {"train": sets}})
    config = load_config(path, ["data.train.1.path=other.jsonl", "data.train.0.sampling={temperature: 0.5}"])
    assert [(one.name, one.path) for one in config.data.train] == [("one", "one.jsonl"), ("two", "other.jsonl")]
    assert config.data.train[0].sampling.temperature == 0.5
    for element in ("2", "first"):
        with pytest.raises(ConfigError, match=f"data.train is a list of 2, without element '{element}'; give a number"):
            load_config(path, [f"data.train.{element}.path=other.jsonl"])


def test_references_take_values_and_defaults(tmp_path):
    tree = {**_MINIMAL, "model": {"path": "policy-${seed}-${rollout.samples_per_prompt}"}}
    config = load_config(_write(tmp_path, "c.yaml", tree), ["seed=3"])
    assert config.model.path == f"policy-3-{Config.model_fields['rollout'].default.samples_per_prompt}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.temprature=1", "rollout.temprature: unknown key"),
        ("rollout.sampling.temprature=1", "did you mean 'rollout.sampling.temperature'"),
        ("rolout.engines=2", "did you mean 'rollout'"),
        ("temperature=0.5", "the nearest key is 'eval.temperature'"),
        ("prepare.policy={architecture: qwen3_5_moe, layers: 2}", "there has to be one: set it to at least 4"),
        ("rollout.engines=two", "rollout.engines: input should be a valid integer"),
        ("rollout.engines=0", "rollout.engines: input should be greater than or equal to 1"),
        ("rollout.engines", "not of the form key.sub=value"),
        ("model.path=${nothing.there}", "${nothing.there}: no such key"),
        ("model.path=${model.path}", "circle"),
        ("actor.processes=3", None),
        ("actor.parallel.tensor=2", "actor.processes is 1, not a multiple of tensor x pipeline x context = 2"),
        ("rollout.max_response_tokens=9000", "more than the pack budget"),
        *(
            (f"{section}, sampling: {{ignore_eos: true{more}}}}}", f"so {key} would apply to none or to all: remove")
            for section, more, key in [
                ("rollout={filters: [truncated]", "", "rollout.filters 'truncated'"),
                ("rollout={generate: {function: calculator}", "", "rollout.generate.function"),
                ("rollout={engines: 1", ", stop: [x]", "rollout.sampling.stop"),
                ("rollout={engines: 1", ", stop_token_ids: [3]", "rollout.sampling.stop_token_ids"),
            ]
        ),
        ("rollout.sampling.top_k=0", "top_k is 0: give how many of the most likely tokens are kept, or -1 for all"),
        ("rollout.sampling.temperature=1.0e-7", "the temperature is 1e-07: give at least 1e-05"),
        ("eval.temperature=1.0e-7", "or 0 where greedy is allowed"),
        ("actor.threads=100000", "actor.threads: input should be less than or equal to 4096"),
        ("actor.optimizer={moments_dtype: bfloat16, beta2: 0.999}", "use at most 0.996, or moments_dtype float32"),
    ],
)
def test_a_wrong_override_is_one_sentence_that_names_the_key(tmp_path, override, expected):
    path = _write(tmp_path, "c.yaml", _MINIMAL)
    if expected is None:
        load_config(path, [override])
        return
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {name: a\n", "c.yaml:2:1: not valid YAML"),
        ("- a\n- b\n", "the file holds list"),
        ("base: c.yaml\n", "leads back to the file itself"),
        ("base: 3\n", "must be a file name"),
        ("run: {name: a}\n1: 2\n", "the key 1 is the name of no section"),
        ("{}", "run: this key is required"),
    ],
)
def test_a_malformed_file_is_named_with_its_place(tmp_path, text, expected):
    with pytest.raises(ConfigError, match=expected.replace("[", r"\[")):
        load_config(_write(tmp_path, "c.yaml", text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_resolved_configuration_reads_back_equal_and_hides_secrets(tmp_path):
    secrets = {"reward": {"options": {"url": "https://me:pw@host/x", "api_key": "abc123"}}}
    config = load_config(_write(tmp_path, "c.yaml", {**_MINIMAL, **secrets}))
    text = resolved_yaml(config)
    assert "abc123" not in text
    assert "me:pw" not in text
    again = load_config(_write(tmp_path, "again.yaml", text))
    assert again.model_dump(exclude={"reward"}) == config.model_dump(exclude={"reward"})


def test_every_field_has_a_docstring():
    without = [name for name, field in iter_fields(Config) if not field.description]
    assert without == []


def test_configuration_imports_nothing_heavy():
    code = (
        "import sys, rlpipe.config, rlpipe.config.load, rlpipe.shared.errors, rlpipe.shared.sample;"
        "print([m for m in ('torch', 'ray', 'sglang', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_start_imports_nothing_that_only_an_end_needs():
    code = "import sys, rlpipe.training.session; print([m for m in ('matplotlib', 'sglang') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_colocated_engines_generate_only_while_the_actor_waits(tmp_path):
    path = _write(tmp_path, "c.yaml", _MINIMAL)
    ahead = ["ray.colocate=true", "rollout.mode=one_step_off", "algorithm.old_policy=rollout"]
    with pytest.raises(ConfigError, match="set rollout.mode to 'sync', ray.colocate to false, or ray.sleep"):
        load_config(path, ahead)
    load_config(path, [*ahead, "ray.sleep=never"])
    colocated = load_config(path, ["ray.colocate=true"]).ray
    assert (colocated.shares_memory(gpus=True), colocated.shares_memory(gpus=False)) == (True, False)


def test_an_evaluation_set_of_its_own_sampling_counts_for_the_engines(tmp_path):
    path = _write(tmp_path, "c.yaml", _MINIMAL)
    plain = load_config(path, ["rollout.max_response_tokens=100"])
    sampling = "{max_response_tokens: 900, stop: [END]}"
    own = load_config(
        path, ["rollout.max_response_tokens=100", f"eval.datasets=[{{name: e, path: e, sampling: {sampling}}}]"]
    )
    assert (plain.longest_response_tokens, plain.uses_stop_strings) == (100, False)
    assert (own.longest_response_tokens, own.uses_stop_strings) == (900, True)
