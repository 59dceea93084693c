"""Cards: their schema, how they stand when code changes, and that README and pages claim only what one holds."""

import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.commands.cards.card_files import CardState, card_states, read_cards
from rlpipe.commands.cards.code_digest import digest_at, present_digest
from rlpipe.commands.cards.record_file import Record, read_record, write_record
from rlpipe.shared.errors import ConfigError, DataError
from rlpipe.shared.project_files import CONFIGS

PROJECT = Path(__file__).parents[2]
CARDS = read_cards()
WRITTEN = {"configuration.md", "metrics.md", "upgrading.md", "recipes.md", "performance.md", "cards.md"}
RECORD = Record("speed", "python speed.py", "2026-01-02", "2 cores of X", {"python": "3"}, "speed 12.5 GB/s", "abc")

# Of the lines with figures, those that hold no result: limits, defaults, thresholds, facts of other packages.
NOT_MEASURED = (
    "README.md: Ampere or newer",
    "README.md: | reported over true FLOPs",
    "README.md: Recorded on ",
    "README.md: - layouts: ",
    "comm_guard.md: stack:",
    "faults.md: | 2 seconds |",
    "faults.md: | 1 to 2 seconds |",
    "faults.md: | 4 to 6 seconds |",
    "faults.md: after 20 seconds they are restarted",
    "plan.md: for an H200 in",
    "plan.md: within 2 %",
    "plan.md: by more than 20 %",
    "plan.md: (bytes: 10 %)",
    "plan.md: within 10 %",
    "questions.md: NVIDIA Ampere and newer",
    "rewards.md: A percentage equals",
    "speed.md: what no phase claims",
    "speed.md: iterations on an H200 are at the top",
    "time.md: above 2 %",
)
# Measured, and told without a record: each is a debt.
NOT_RECORDED = ("lora.md: A weight is off by 2.6 % of its norm",)
_FIGURE = re.compile(
    r"\d ?%|\d ?(?:GB/s|TFLOP|tokens/s|ms\b|microseconds|seconds|minutes)|\d ?x (?:the|as|faster)"
    r"|\bH[12]00\b"
)


def _project(folder, records=("speed.cpu",), says=None):
    """A repository with one file, a card about it and its record."""
    for name in ("cards", "results", "actor"):
        (folder / name).mkdir()
    (folder / "actor" / "fast.py").write_text("SPEED = 1\n")
    lines = ["fast:", "  claim: It is fast enough.", "  command: python speed.py", "  code: [actor]"]
    lines += [f"  records: [{', '.join(records)}]", "  numbers: {speed: 'speed ([0-9.]+)'}"]
    (folder / "cards" / "claims.yaml").write_text("\n".join(lines) + "\n")
    code = {"fast": present_digest(folder, ["actor"])}
    write_record(replace(RECORD, code=code), folder / "results")
    return folder


def _status(folder):
    (state,) = card_states(folder / "cards", folder / "results", folder)
    return state.status


def test_a_card_is_stale_once_its_code_has_changed_and_unknown_without_it(tmp_path):
    folder = _project(tmp_path)
    (state,) = card_states(folder / "cards", folder / "results", folder)
    assert (state.status, state.numbers(), state.newest.commit) == ("seen", {"speed": "12.5"}, "abc")
    (folder / "actor" / "fast.py").write_text("SPEED = 2\n")
    assert _status(folder) == "stale"
    (folder / "actor" / "fast.py").write_text("SPEED = 1\n")
    assert _status(folder) == "seen"
    (folder / "actor" / "new.py").write_text("")
    assert _status(folder) == "stale"
    for file in (folder / "actor").iterdir():
        file.unlink()
    assert _status(folder) == "unknown"


def test_a_card_is_seen_only_where_all_of_its_records_are_of_the_code_that_is_there(tmp_path):
    folder = _project(tmp_path, records=("speed.cpu", "later.cpu"))
    first = {"fast": present_digest(folder, ["actor"])}
    write_record(replace(RECORD, name="later", code=first), folder / "results")
    assert _status(folder) == "seen"
    (folder / "actor" / "fast.py").write_text("SPEED = 2\n")
    write_record(replace(RECORD, name="later", code={"fast": present_digest(folder, ["actor"])}), folder / "results")
    assert _status(folder) == "seen in part"
    write_record(replace(RECORD, name="later", code={}), folder / "results")
    assert _status(folder) == "stale"


def test_a_card_without_a_record_was_never_run_and_a_missing_record_is_an_error(tmp_path):
    folder = _project(tmp_path, records=())
    assert _status(folder) == "never run"
    cards = folder / "cards" / "claims.yaml"
    cards.write_text(cards.read_text().replace("records: []", "records: [other.cpu]"))
    with pytest.raises(DataError, match=r"other\.cpu\.json: there is no such record"):
        _status(folder)


def test_the_code_of_a_commit_has_the_digest_of_the_same_files(tmp_path):
    folder = _project(tmp_path)
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    for patterns in (["actor"], ["actor/*.py"], ["actor/fast.py", "cards"]):
        assert digest_at(folder, "HEAD", patterns) == present_digest(folder, patterns) != ""
    (folder / "actor" / "fast.py").write_text("SPEED = 2\n")
    assert digest_at(folder, "HEAD", ["actor"]) != present_digest(folder, ["actor"])
    with pytest.raises(DataError, match="git knows no commit 'nothing'"):
        digest_at(folder, "nothing", ["actor"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("claim: It is fast enough.", "claims: It is fast enough."), r"card fast: claim"),
        (("code: [actor]", "code: []"), r"card fast: code: List should have at least 1 item"),
        (("speed ([0-9.]+)", "speed [0-9.]+"), "has 0 groups; mark the number with one"),
        (("speed ([0-9.]+)", "speed ("), "is not a regular expression"),
        (("fast:", "- fast"), "claims.yaml"),
    ],
)
def test_what_does_not_follow_the_schema_is_named(tmp_path, change, sentence):
    cards = _project(tmp_path) / "cards" / "claims.yaml"
    cards.write_text(cards.read_text().replace(*change))
    with pytest.raises(ConfigError, match=sentence):
        read_cards(cards.parent)


def test_the_command_prints_the_table_and_a_card_whole():
    table = CliRunner().invoke(app, ["cards"]).output
    assert all(f"  {name} " in table for name in CARDS)
    assert f"{len(CARDS)} cards: " in table
    packing = CliRunner().invoke(app, ["cards", "packing"]).output
    assert "python benchmarks/packing.py" in packing and "number    packs at 8192: 42" in packing
    unknown = CliRunner().invoke(app, ["cards", "pakcing"])
    assert unknown.exit_code == 2 and "did you mean 'packing'?" in unknown.stderr


def test_every_configuration_of_a_run_has_a_card():
    files = [*CONFIGS.glob("demo/*.yaml"), *CONFIGS.glob("gpu/*.yaml"), *CONFIGS.glob("recipes/qwen*.yaml")]
    named = {str(file.relative_to(CONFIGS).with_suffix("")) for file in files}
    assert {name for name, (kind, _) in CARDS.items() if kind == "recipes"} == named


@cache
def _states() -> dict[str, CardState]:
    return {state.name: state for state in card_states()}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_names_code_that_is_there_and_finds_its_numbers(name):
    state = _states()[name]
    assert state.status != "unknown", f"a path of {state.card.code} is not there, or run benchmarks/record.py --cards"
    if state.records:
        assert set(state.numbers()) == set(state.card.numbers)
    for record in state.records:
        assert record.commit and not record.commit.endswith("+"), "recorded with files that no commit has"


def _rounds_to(said: str, number: str) -> bool:
    """Whether `said`, as a page has it, is `number` of a record, rounded, or as a share or in milliseconds."""
    digits = len(said.partition(".")[2])
    value = float(number.rstrip("%x ").replace(",", ""))
    return any(round(value * scale, digits) == float(said) for scale in (1, 100, 1000))


@pytest.mark.parametrize("name", [name for name, (_, card) in CARDS.items() if card.says])
def test_what_a_page_says_stands_in_the_card_s_records(name):
    state = _states()[name]
    printed = " ".join(record.output for record in state.records)
    for page, texts in state.card.says.items():
        for text in texts:
            assert text in (PROJECT / page).read_text(), f"{page} does not say {text!r}"
            for said in re.findall(r"\d+(?:\.\d+)?", text):
                known = [one for number in state.numbers().values() for one in re.findall(r"[\d.,]+", number)]
                assert said in printed or any(_rounds_to(said, number) for number in known), f"{said} in {page}"


def test_readme_and_pages_claim_no_result_without_a_card():
    said = [text for _, card in CARDS.values() for texts in card.says.values() for text in texts]
    pages = [PROJECT / "README.md", *(page for page in PROJECT.glob("docs/*.md") if page.name not in WRITTEN)]
    exempt = [one.partition(": ")[::2] for one in (*NOT_MEASURED, *NOT_RECORDED)]
    found = [
        f"{page.name}: {line}"
        for page in pages
        for line in page.read_text().splitlines()
        if _FIGURE.search(line)
        and not any(text in line for text in said)
        and not any(page.name == name and text in line for name, text in exempt)
    ]
    assert found == [], "give it a card that says it, or list it as not measured"
    for name, text in exempt:
        assert text in (PROJECT / name if name == "README.md" else PROJECT / "docs" / name).read_text(), (name, text)


def test_records_are_read_as_they_were_written(tmp_path):
    file = write_record(replace(RECORD, host="8 cores of X, 2 x GPU Y"), tmp_path)
    assert file.name == "speed.cuda2.json" and read_record(file).versions == {"python": "3"}
    file.write_text('{"name": 1}')
    with pytest.raises(DataError, match="is no record"):
        read_record(file)
