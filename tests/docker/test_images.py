"""Images, as far as they can be tested without building them: labels, copied files, install steps in a clean folder."""

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlpipe.commands.doctor.packages import TORCH, read_pins

PROJECT = Path(__file__).parents[2]
IMAGES = {kind: PROJECT / "docker" / f"Dockerfile.{kind}" for kind in ("cpu", "gpu")}


def _instructions(kind: str, word: str) -> list[str]:
    text = re.sub(r"\\\n\s*", " ", IMAGES[kind].read_text())
    return [line.removeprefix(word).strip() for line in text.splitlines() if line.startswith(f"{word} ")]


@pytest.mark.parametrize("kind", IMAGES)
def test_labels_are_the_pinned_versions(kind):
    pins = {"torch": TORCH[kind], **read_pins(PROJECT / "requirements" / f"{kind}.txt")}
    labels = dict(re.findall(r'rlpipe\.([\w-]+)="([^"]+)"', IMAGES[kind].read_text()))
    assert {"torch", "sglang", "megatron-core", "ray"} <= set(labels)
    assert {name: version for name, version in labels.items() if name != "cuda"} == {
        name: pins[name] for name in labels if name != "cuda"
    }


@pytest.mark.parametrize("kind", IMAGES)
def test_an_ordinary_user_runs_it_with_a_health_check_and_no_secret(kind):
    assert _instructions(kind, "USER") == ["1000"]
    assert _instructions(kind, "HEALTHCHECK") and _instructions(kind, "VOLUME")
    assert not re.search(r"(KEY|TOKEN|SECRET|PASSWORD)\s*=", IMAGES[kind].read_text())


@pytest.mark.parametrize("kind", IMAGES)
def test_copied_files_are_there(kind):
    for line in _instructions(kind, "COPY"):
        *sources, _ = [part for part in shlex.split(line) if not part.startswith("--")]
        assert all((PROJECT / source).exists() for source in sources), line


@pytest.mark.parametrize("kind", IMAGES)
def test_code_that_comes_after_the_environment_can_be_imported(kind, tmp_path):
    """The layers in their order, in a clean folder: first what the environment needs, then the code."""
    environment, code = [line for line in _instructions(kind, "COPY")][:-1], _instructions(kind, "RUN")[-1]
    for line in environment:
        *sources, target = [part for part in shlex.split(line) if not part.startswith("--")]
        for source in sources:
            _copy(PROJECT / source, tmp_path / (source if target == "./" else target))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    python = tmp_path / ".venv" / "bin" / "python"
    (next((tmp_path / ".venv" / "lib").glob("python*")) / "site-packages" / "tools.pth").write_text(
        site.getsitepackages()[0]
    )
    for name in ("rlpipe", "actor", "rollout", "rewards"):
        _copy(PROJECT / name, tmp_path / name)
    arguments = shlex.split(code)
    assert arguments[:2] == [".venv/bin/pip", "install"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-m", "pip", *arguments[1:]], cwd=tmp_path, env=clean, check=True, timeout=400)
    found = subprocess.run(
        [python, "-c", "import rlpipe, actor, rollout, rewards; print(rlpipe.__file__)"],
        cwd="/",
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(tmp_path / "rlpipe" / "__init__.py")


def test_compose_names_images_that_exist_and_hands_secrets_on_by_name():
    services = yaml.safe_load((PROJECT / "docker/compose.yaml").read_text())["services"]
    for kind, service in services.items():
        assert PROJECT / service["build"]["dockerfile"] == IMAGES[kind]
        assert all("=" not in variable for variable in service["environment"])


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
