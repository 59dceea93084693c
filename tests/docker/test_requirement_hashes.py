"""Everything that is installed is pinned with the hashes of its files, and the set-up scripts insist on them."""

import re
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


@pytest.mark.parametrize(("script", "lists"), [("setup.sh", ["cpu"]), ("setup_gpu.sh", ["gpu"])])
def test_scripts_install_with_hashes(script: str, lists: list[str]) -> None:
    text = (PROJECT / "scripts" / script).read_text()
    version = re.search(r"^torch_version=(.+)$", text, re.M)
    assert version is not None
    for name in lists:
        assert f"requirements/hashes/{name}_torch.txt" in text
        assert _pins(HASHES / f"{name}_torch.txt")["torch"] == f"=={version[1]}"
    installs = [line for line in text.splitlines() if re.search(r"install\[@\].* -r ", line)]
    assert installs and all("--require-hashes" in line for line in installs)
