"""A wheel, installed where no checkout is: every command finds its files, from any folder."""

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.config.load import load_config
from rlpipe.model.hub import pinned
from rlpipe.shared.project_files import CONFIGS, ROOT

_FILES = ("pyproject.toml", "setup.py", "README.md")
_FOLDERS = ("rlpipe", "actor", "rollout", "rewards", "benchmarks", "cards", "configs", "requirements", "scripts")
_ROW = '{"prompt": [{"role": "user", "content": "1 + 1 ="}], "label": "2"}\n'
_MINE = """\
base: ../configs/demo/arithmetic.yaml
run: {name: mine}
warm_start: null
data: {train: [{name: mine, path: mine/rows.jsonl}]}
eval: {datasets: []}
rollout: {prompts_per_iteration: 4}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`rlpipe` of a fresh environment that sees this one's packages, but the wheel's rlpipe."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(wheel, env=_clean(), check=True, timeout=300)
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(site.getsitepackages()[0])
    install = ["--python", folder / "venv/bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    # This environment's own rlpipe is seen there too.
    subprocess.run([*pip, *install, "--ignore-installed", *folder.glob("*.whl")], env=_clean(), check=True, timeout=300)
    return folder / "venv/bin/rlpipe"


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(program: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [program, *arguments], cwd=folder, env=_clean(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_installed_program_works_with_copies_of_its_recipes(program, tmp_path):
    copied = _run(program, tmp_path, "recipes", "copy", "gpu/arithmetic")
    assert copied == "configs/gpu/arithmetic.yaml\n  based on configs/demo/arithmetic.yaml\n"
    assert "unknown" in _run(program, tmp_path, "cards", "packing")  # its sources are not here
    planned = _run(program, tmp_path, "plan", "configs/gpu/arithmetic.yaml", "model.path=Qwen3-8B", code=1)
    assert "on local_cpu" in planned and "DOES NOT FIT" in planned
    script = _run(program, tmp_path, "launch", "configs/demo/arithmetic.yaml", "--cluster", "local_cpu", "--dry-run")
    assert f"\ncd {tmp_path} || exit\n" in script and f"\nexport RLPIPE_PROGRAMS={program.parent}\n" in script
    (launcher,) = [word for word in script.split() if word.endswith("local.sh")]
    assert Path(launcher).is_file() and Path(launcher).is_relative_to(program.parents[1])


@pytest.mark.slow
def test_paths_are_relative_to_the_working_folder_and_bases_to_their_file(program, tmp_path):
    _run(program, tmp_path, "recipes", "copy", "demo/arithmetic")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/rows.jsonl").write_text(_ROW * 4)
    (tmp_path / "mine/run.yaml").write_text(_MINE)
    assert "from 4 training prompts" in _run(program, tmp_path, "train", "mine/run.yaml", "--dry-run")
    assert (tmp_path / "runs").is_dir()
    refused = _run(program, tmp_path / "mine", "train", "run.yaml", "--dry-run", code=2)
    assert "mine/rows.jsonl" in refused


def test_a_copy_says_the_same_as_what_it_was_copied_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [path.relative_to(CONFIGS) for path in CONFIGS.glob("[dgr]*/*.yaml")]
    listed = CliRunner().invoke(app, ["recipes", "list"]).output
    for name in names:
        result = CliRunner().invoke(app, ["recipes", "copy", str(name)])
        assert result.exit_code == 0, result.output
        assert str(name.with_suffix("")) in listed
        # What a recipe lacks that others are based on.
        complete = ["run={name: copied, iterations: 2}", "model.path=policy", "actor.max_tokens_per_gpu=8448"]
        complete += ["data.train=[{name: rows, path: rows.jsonl}]"]
        assert load_config(Path("configs") / name, complete) == load_config(CONFIGS / name, complete)


def test_a_changed_copy_is_not_replaced_unless_asked_for(tmp_path):
    def copy(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["recipes", "copy", "gpu/arithmetic", "--to", str(tmp_path), *more])
        return result.exit_code, result.output

    assert copy()[0] == 0 and copy()[0] == 0
    (tmp_path / "configs/demo/arithmetic.yaml").write_text("seed: 3\n")
    (tmp_path / "configs/gpu/arithmetic.yaml").unlink()
    code, output = copy()
    assert code == 2 and "demo/arithmetic.yaml is there already and differs" in output
    assert not (tmp_path / "configs/gpu/arithmetic.yaml").exists()
    assert copy("--overwrite")[0] == 0
    assert load_config(tmp_path / "configs/gpu/arithmetic.yaml").seed == 0


def test_a_recipe_that_is_not_here_yet_is_told_with_the_command_that_copies_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["config", "configs/gpu/arithmetic.yaml"])
    assert result.exit_code == 2
    assert "`rlpipe recipes copy configs/gpu/arithmetic.yaml` to have it here" in result.output


def test_an_unclear_name_is_one_sentence():
    for name, words in (("arithmetic", "say which of demo/arithmetic, gpu/arithmetic"), ("gsm9k", "mean 'gsm8k'")):
        result = CliRunner().invoke(app, ["recipes", "copy", name])
        assert result.exit_code == 2 and words in result.output


def test_a_run_keeps_its_models_folder_for_commands_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "policy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert pinned("policy") == str(tmp_path / "policy") == pinned(str(tmp_path / "policy"))
