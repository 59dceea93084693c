"""The documentation: generated pages are current, commands in it run, the site builds, links and names exist."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlpipe.config.load import validate
from rlpipe.model.families import FAMILIES

PROJECT = Path(__file__).parents[2]
PAGES = sorted([*PROJECT.glob("docs/**/*.md"), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"])
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\brlpipe ([\w-]+)")
_MINIMAL = {
    "run": {"name": "r", "iterations": 2},
    "model": {"path": "policy"},
    "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
}


_LONG = ("own_environment", "own_reward")
"""Pages whose blocks train or grade, which the quick start's do, too."""


def _blocks(language: str) -> list[pytest.param]:
    found = []
    for page in PAGES:
        for index, (name, text) in enumerate(_BLOCK.findall(page.read_text())):
            if name == language:
                marks = [pytest.mark.slow] if language == "bash" and page.stem in _LONG else []
                found.append(pytest.param(text, id=f"{page.stem}-{index}", marks=marks))
    return found


def _run(*command: str, cwd: Path = PROJECT) -> str:
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_names_every_command():
    from rlpipe.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    shown = re.findall(r"^    rlpipe ([\w-]+)", (PROJECT / "README.md").read_text(), re.MULTILINE)
    assert set(shown) == known


def test_families_that_are_only_counted_are_named():
    text = (PROJECT / "docs/models.md").read_text()
    (named,) = re.findall(r"which cannot be trained: (.*?) \(`model_type`\)", text, re.DOTALL)
    counted = {name for name, family in FAMILIES.items() if family.training is None}
    assert set(re.findall(r"`(\w+)`", named)) == {name for name in counted if not name.endswith("_text")}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_that_a_page_names_are_there(page):
    named = set(
        re.findall(
            r"`((?:rlpipe|actor|rollout|rewards|tests|scripts|benchmarks|configs)/[\w/.-]*)`",
            (PROJECT / page).read_text(),
        )
    )
    assert named
    assert [name for name in sorted(named) if not (PROJECT / name).exists()] == []


def test_files_that_ask_for_the_device_are_seams_of_the_design():
    asks = re.compile(r"cuda\.is_available\(\)|= cluster_gpus\(\)|if cluster_gpus\(\)|\.is_cuda\b|device\.type [!=]=")
    rooms = ("actor", "rollout", "rlpipe/training", "rlpipe/generation", "rlpipe/batching", "rlpipe/algorithms")
    found = {
        str(path.relative_to(PROJECT))
        for room in rooms
        for path in (PROJECT / room).rglob("*.py")
        if "cpu_stand_ins" not in path.parts and asks.search(path.read_text())
    }
    seams = (PROJECT / "docs/design.md").read_text().partition("## Seams")[2].partition("## ")[0]
    assert found and {name for name in found if f"`{name}`" not in seams} == set()


def test_generated_pages_are_current():
    _run(sys.executable, "scripts/generate_docs.py", "--check")


def test_the_site_builds_without_warnings(tmp_path):
    _run(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site"))
    assert (tmp_path / "site" / "quick_start" / "index.html").exists()
    design = (tmp_path / "site" / "design" / "index.html").read_text()
    assert design.count("<svg id=") == 2 and "language-mermaid" not in design
    algorithms = (tmp_path / "site" / "algorithms" / "index.html").read_text()
    assert algorithms.count("<math") > 30 and "arithmatex" not in algorithms and "$" not in _visible_text(algorithms)
    functions = (tmp_path / "site" / "api" / "functions" / "index.html").read_text()
    assert "rollout_logprobs" in functions and "sequence_mean" in functions


def _visible_text(page: str) -> str:
    return re.sub(r"<pre>.*?</pre>|<[^>]*>", "", page, flags=re.DOTALL)


def test_every_page_is_in_the_sites_navigation():
    def pages(entry):
        return (
            [entry]
            if isinstance(entry, str)
            else [page for one in entry for part in one.values() for page in pages(part)]
        )

    navigation = yaml.safe_load((PROJECT / "mkdocs.yml").read_text())["nav"]
    there = {str(page.relative_to(PROJECT / "docs")) for page in PROJECT.glob("docs/**/*.md")}
    assert there == set(pages(navigation))


def _fields_in_source(package: str, path: str) -> set[str]:
    """Fields of the data classes in a file of a package, which takes long to import."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    return set(re.findall(r"^    (\w+): ", (folder / path).read_text(), re.MULTILINE))


def test_settings_and_metrics_that_pages_name_exist():
    from rlpipe.config.load import iter_fields
    from rlpipe.config.root import Config
    from rlpipe.monitoring.metric_dictionary import METRICS

    keys = {name for name, _ in iter_fields(Config)}
    text = (PROJECT / "docs/tutorials/from_verl_or_trl.md").read_text()
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ") and "`" in line]
    ours = {name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.0-9]+)", row[3])}
    assert len(ours) > 40 and ours <= keys, ours - keys
    theirs = {name.split(":")[0] for row in rows for name in re.findall(r"`([\w: ]+)`", row[2])}
    fields = _fields_in_source("trl", "trainer/grpo_config.py") | _fields_in_source("transformers", "training_args.py")
    assert len(theirs) > 30 and theirs <= fields | {"reward_funcs"}, theirs - fields
    for page in ("speed", "questions", "tutorials/first_gpu_run", "tutorials/own_reward"):
        named = re.findall(
            r"`((?:perf|time|rollout|reward|pack|mismatch|eval)/[a-z_]+)`", (PROJECT / f"docs/{page}.md").read_text()
        )
        assert set(named) <= set(METRICS), set(named) - set(METRICS)


@pytest.mark.parametrize("text", _blocks("bash"))
def test_shell_blocks_run(tmp_path, text):
    """In a folder that looks like the project and can be written to."""
    for name in ("configs", "scripts", "rlpipe"):
        (tmp_path / name).symlink_to(PROJECT / name)
    output = _run("bash", "-euc", text, cwd=tmp_path)
    assert output.strip()


@pytest.mark.parametrize("text", _blocks("yaml"))
def test_settings_blocks_are_valid(text):
    tree = yaml.safe_load(text)
    validate({**_MINIMAL, **tree}, "block")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_links_exist(page):
    from rlpipe.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    text = page.read_text()
    commands = {name for line in text.splitlines() if line.startswith("    rlpipe ") for name in _COMMAND.findall(line)}
    assert commands <= known
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
