"""YAML of configurations: read in one way only, plain data only, and never a traceback."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.load import load_config
from rlpipe.config.strict_yaml import StrictYamlError, dump_yaml, load_yaml
from rlpipe.shared.errors import ConfigError

_MINIMAL = {
    "run": {"name": "r", "iterations": 2},
    "model": {"path": "policy"},
    "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
}
_BOMB = "a: &a [x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e-6", 1e-6),
        ("0x1F", 31),
        ("20_000", 20_000),
        ("True", True),
        ("{<<: {b: 1, c: 2}, b: 3}", {"b": 3, "c": 2}),
    ],
)
def test_plain_text_is_read_as_the_core_schema_says(text, expected):
    found = load_yaml(f"k: {text}")["k"]
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: {c: 1,\n c: 2}", "c.yaml:3:2: the key 'c' stands twice here"),
        ("a: 010", "c.yaml:1:4: the number 010 has a leading zero"),
        ("a: &x [*x]", "an anchor contains itself"),
        ("a: " + "[" * 100_000, "nested more than 40 levels deep"),
        ("a: " + "- " * 5000, "not valid YAML"),
        (_BOMB, "it expands to more than 200,000 values"),
        ("a: !!python/name:os.system x", "'!!python/name:os.system' is not plain data"),
        ("a: !!binary aGk=", "'!!binary' is not plain data"),
        ("? [1]\n: 2", "a list or mapping cannot be a key"),
        ("a: " + "9" * 5000, "a number of 5000 digits"),
        ("a: !!int x", "'x' is not a whole number"),
        ("--- a\n--- b", "another document"),
        ("a: \x01", "character 1 is not allowed"),
    ],
)
def test_what_can_be_read_in_two_ways_or_does_harm_is_refused_with_its_place(tmp_path, text, expected):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


_TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
_WORDS = st.sampled_from(
    ["off", "010", "1:30", "1e5", "null", "~", "", "<<", "=", "0x1f", "1_000", ".inf", "2024-01-01"]
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS | _WORDS


@given(
    st.recursive(
        _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS | _WORDS, inner, max_size=3)
    )
)
def test_what_is_written_reads_back_equal(tree):
    assert load_yaml(dump_yaml(tree)) == tree


@given(st.text(alphabet=st.sampled_from("ab:-[]{}!&*'\"|>%@#,? \n\t\x00\x7f<=~.0123456789eEoxinf_"), max_size=60))
def test_no_text_makes_a_traceback(text):
    try:
        load_yaml(text)
    except StrictYamlError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=true", "seed: input should be a valid integer, but it is True"),
        ("seed='1'", "seed: input should be a valid integer, but it is '1'"),
        ("seed=1.0", "seed: input should be a valid integer"),
        ("data.shuffle=yes", "data.shuffle: input should be a valid boolean, but it is 'yes'"),
        ("data.shuffle=1", "data.shuffle: input should be a valid boolean"),
        ("rollout.sampling.temperature=true", "rollout.sampling.temperature: input should be a valid number"),
        ("actor.optimizer.learning_rate=.inf", "actor.optimizer.learning_rate: inf is not a finite number"),
        ("actor.optimizer.learning_rate=1e999", "actor.optimizer.learning_rate: inf is not a finite number"),
        ("reward.options={scale: .nan}", "reward.options.scale: nan is not a finite number"),
        ("rollout.engine.sglang={x: [.inf]}", "rollout.engine.sglang.x.0: inf is not a finite number"),
        ('model.path="a\\0b"', "model.path: the text holds '\\x00', which is not a character"),
        ('model.path="\\ud800"', "model.path: the text holds '\\ud800', which is not a character"),
        ("seed=" + "[" * 3000, "nested more than 40 levels deep"),
        ("model.path=' '", "model: path is blank; give a text"),
        ("data.train.0.prompt_column=''", "prompt_column is blank"),
        ("rollout.sampling.stop=['']", "stop holds an empty text"),
        ("rollout.sampling.stop_token_ids=[-5]", "rollout.sampling.stop_token_ids.0: input should be greater than or"),
        ("ray.environment={'A=B': x}", "'A=B' cannot be the name of an environment variable"),
        ("actor.optimizer.learning_rate=1e300", "learning_rate is 1e+300, which cannot be computed with in float32"),
        ("rollout.sampling.temperature=1e-320", "temperature is 9.99989e-321: give at least 1e-05"),
        ("deadlines.train_seconds=1e12", "train_seconds is 1e+12 seconds, longer than anyone waits"),
        ("run.iterations=100000000000000000000", "iterations is 100000000000000000000, more than"),
        ("actor.frozen_parameters=['[']", "actor.frozen_parameters: '[' is not a regular expression"),
        ("run.name=../../x", "run.name: the name is '../../x'; use letters"),
        ("run.name=.", "run.name: the name is '.'; use letters"),
        ("run.name=a/b", "run.name: the name is 'a/b'; use letters"),
        ("run.name=''", "run.name: the name is ''; use letters"),
        (f"run.name={'x' * 300}", "run.name: the name is 300 characters long; use letters"),
        ("data.train.0.name=../x", "data.train.0.name: the name is '../x'; use letters"),
        ("data.train.0.rows=1-3", "data.train.0.rows: '1-3' must be start:stop"),
        ("data.train.0.prompt_template=Q", "data.train.0.prompt_template: 'Q' must name {prompt}"),
        ("data.train.0.prompt_template='{prompt.nope}'", "has {prompt.nope}, but only names of columns"),
        ("data.train.0.prompt_template='{prompt'", "expected '}' before end of string"),
        ("data.train.0.prompt_template='{prompt:>99999999999}'", "formats {prompt}, which is put in as it is"),
        ("data.train.0.prompt_template='{}{prompt}'", "has {}, but only names of columns can stand there"),
        ("sft={response_template: '{label.__class__}'}", "has {label.__class__}, but only names of columns"),
        ("data.train=[{name: a, path: b}, {name: a, path: c}]", "data.train: 2 data sets have the name 'a'"),
        ("eval.datasets=[{name: a, path: b}, {name: a, path: c}]", "eval.datasets: 2 data sets have the name 'a'"),
        ("eval.datasets=[{name: t, path: b, reward: f1}]", "have a set 't' each, with other graders"),
        ("model.path=x${data.shuffle}", "${data.shuffle} is True, which cannot stand inside a text"),
        ("reward.options={a: '${rollout}', b: 010}", "has a leading zero"),
    ],
)
def test_types_are_strict_and_names_are_names(tmp_path, override, expected):
    path = tmp_path / "c.yaml"
    path.write_text(dump_yaml(_MINIMAL))
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_stop_string_may_be_white_space(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(dump_yaml(_MINIMAL))
    assert load_config(path, ['rollout.sampling.stop=["\\n\\n", " "]']).rollout.sampling.stop == ["\n\n", " "]


def test_references_that_multiply_end(tmp_path):
    links = {f"a{i}": f"${{reward.options.a{i + 1}}}" * 30 for i in range(8)}
    path = tmp_path / "c.yaml"
    path.write_text(dump_yaml({**_MINIMAL, "reward": {"options": links}}))
    with pytest.raises(ConfigError, match="references expand to more than"):
        load_config(path)


def test_bases_that_multiply_end(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.yaml").write_text(f"base: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "12.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="`base` leads to more than 100 files"):
        load_config(tmp_path / "0.yaml")
