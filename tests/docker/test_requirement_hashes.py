"""Everything that is installed is pinned with the hashes of its files, and the set-up scripts insist on them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]
HASHES = PROJECT / "requirements" / "hashes"


def _pins(path: Path) -> dict[str, str]:
    text = re.sub(r"(^|\s)#.*", "", path.read_text().replace("\\\n", " "))
    lines = [line.split("--hash")[0].strip() for line in text.splitlines()]
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): str(one.specifier) for one in found}


@pytest.mark.parametrize("name", ["cpu", "dev", "gpu"])
def test_every_pin_has_its_hashes(name: str) -> None:
    """Otherwise: bash scripts/hash_requirements.sh"""
    assert _pins(HASHES / f"{name}.txt") == _pins(PROJECT / "requirements" / f"{name}.txt")


@pytest.mark.parametrize("path", sorted(HASHES.glob("*.txt")), ids=lambda path: path.stem)
def test_every_requirement_is_exact_and_hashed(path: Path) -> None:
    for line in path.read_text().replace("\\\n", " ").splitlines():
        requirement, *hashes = line.split("--hash=")
        assert re.match(r"[\w.-]+==[\w.]+ *(;.*)?$", requirement), line
        assert hashes and all(re.match(r"sha256:[0-9a-f]{64} *$", one) for one in hashes), line


def test_the_script_installs_with_hashes() -> None:
    text = (PROJECT / "scripts" / "setup.sh").read_text()
    for device in ("cpu", "gpu"):
        version = re.search(rf"^{device}_torch_version=(.+)$", text, re.M)
        assert version is not None
        assert f"requirements/hashes/{device}_torch.txt" in text
        assert _pins(HASHES / f"{device}_torch.txt")["torch"] == f"=={version[1]}"
    installs = [line for line in text.splitlines() if re.search(r"install\[@\].* -r ", line)]
    assert installs and all("--require-hashes" in line for line in installs)


@pytest.mark.skipif(not shutil.which("localedef"), reason="needs localedef, to make the languages of a machine")
def test_an_environment_is_up_to_date_in_every_language(tmp_path: Path) -> None:
    """Whose rules decide in which order a pattern's files come."""
    for path in ("scripts", "requirements"):
        shutil.copytree(PROJECT / path, tmp_path / path)
    for path in ("pyproject.toml", "setup.py"):
        shutil.copy(PROJECT / path, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "pip").write_text('#!/bin/sh\necho "$@" >> pip.log\n')
    (programs / "pip").chmod(0o755)
    subprocess.run(["localedef", "-i", "en_US", "-f", "UTF-8", tmp_path / "en_US.UTF-8"], check=True)
    for language in ("C", "en_US.UTF-8"):
        environment = os.environ | {"LC_ALL": language, "LOCPATH": str(tmp_path)}
        subprocess.run(["bash", "scripts/setup.sh", "cpu", "dev"], cwd=tmp_path, env=environment, check=True)
        installed = (tmp_path / "pip.log").read_text()
        (tmp_path / "pip.log").write_text("")
        assert ("-r requirements/hashes/cpu.txt" in installed) == (language == "C"), (language, installed)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_is_pinned_is_what_the_package_asks_for(device: str) -> None:
    """A wheel's dependencies are ranges; the pins, which are tested, lie within them and leave none out."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    pins = {**_pins(PROJECT / "requirements" / f"{device}.txt"), **_pins(HASHES / f"{device}_torch.txt")}
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras[device], *extras["wandb"], *extras["tensorboard"]]:
        wanted = Requirement(text)
        pin = pins[canonicalize_name(wanted.name)].removeprefix("==")
        assert wanted.specifier.contains(pin, prereleases=True), f"{text}, but {pin} is pinned"


def test_the_cpu_extra_holds_what_sglang_needs_there() -> None:
    """SGLang itself is installed with --no-deps on a CPU, because its metadata ask for CUDA packages."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = {canonicalize_name(Requirement(text).name) for text in declared}
    of_sglang = [Requirement(text) for text in requires("sglang") or []]
    needed = {canonicalize_name(one.name) for one in of_sglang if not one.marker or one.marker.evaluate({"extra": ""})}
    assert (needed & set(_pins(PROJECT / "requirements" / "cpu.txt"))) <= names
