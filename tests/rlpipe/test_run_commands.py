"""`rlpipe status`, `rlpipe logs` and `rlpipe report A B`, as a user calls them."""

import json
import os
import socket
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import rlpipe
from rlpipe.cli import app
from rlpipe.commands.export_policy import _check_disk
from rlpipe.commands.run_logs import run_logs
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_lock import lock_path, run_lock
from rlpipe.shared.errors import EXIT_CODE, ResourceError
from rlpipe.shared.policy_facts import PolicyFacts
from rlpipe.shared.project_files import ROOT


def _run(folder, rate=0.001, iterations=3):
    directory = RunDirectory(folder)
    directory.logs.mkdir(parents=True)
    directory.config.write_text(f"run: {{name: {folder.name}, iterations: 4}}\nactor: {{rate: {rate}}}\nseed: 1\n")
    for iteration in range(iterations):
        row = {"iteration": iteration, "eval/x/accuracy": 0.25 * iteration, "time/step_seconds": 30.0}
        append_json_line(directory.metrics, row | {"rollout/reward_mean": 10 * rate + iteration})
    (directory.logs / "engine_0.log").write_text("one\ntwo\nthree\n")
    (directory.logs / "actor_0.log").write_text("four\n")
    return folder


def _called(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_status_of_a_run_that_goes_on_was_killed_or_ended(tmp_path):
    run = _run(tmp_path / "a")
    with run_lock(run):
        output = _called("status", run).output
        assert "running: process" in output and "2 of 4" in output and "about 1 min 00 s left" in output
    assert "not running" in _called("status", run).output
    # The lock's file of a killed process stays, and its number may be another's by now.
    owner = {"pid": 1, "host": socket.gethostname(), "since": "2000-01-01T00:00:00+00:00"}
    lock_path(run).write_text(json.dumps(owner))
    assert "not running" in _called("status", run).output
    for iteration in (3, 4):
        append_json_line(RunDirectory(run).metrics, {"iteration": iteration, "time/step_seconds": 1.0})
    output = _called("status", run).output
    assert "finished" in output and "0 → 0.5" in output
    assert _called("status", tmp_path / "nowhere").exit_code == EXIT_CODE


def test_logs_are_told_apart_and_followed(tmp_path):
    run = _run(tmp_path / "a")
    assert _called("logs", run, "-n", 2).output.splitlines() == ["actor_0: four", "engine_0: two", "engine_0: three"]
    assert _called("logs", run, "engine", "-n", 1).output == "three\n"
    missing = _called("logs", run, "gpu")
    assert missing.exit_code == EXIT_CODE and "actor_0.log, engine_0.log" in missing.output
    followed = run_logs(run, ["engine"], 1, follow=True)
    assert next(followed) == "three"
    with (run / "logs" / "engine_0.log").open("a") as file:
        file.write("five\nhalf")
    assert next(followed) == "five"
    with (run / "logs" / "engine_0.log").open("a") as file:
        file.write(" and half\n")
    assert next(followed) == "half and half"


def test_two_runs_are_compared_on_one_page(tmp_path):
    one, other, page = _run(tmp_path / "a"), _run(tmp_path / "b", rate=0.5, iterations=2), tmp_path / "page.html"
    assert _called("report", one, other, "--output", page).exit_code == 0
    text = page.read_text()
    assert "<td>actor.rate</td><td class='text'>0.001</td><td class='text'>0.5</td>" in text
    assert "<td>seed" not in text and "<td>run.name" not in text
    assert text.count("<figure>") >= 3
    first = text[text.index("<figure>") :].split("</figure>")[0]
    assert "class='b0'></i>a<" in first and "class='b1'></i>b<" in first
    twice = _called("report", one, one, "--output", page)
    assert twice.exit_code == EXIT_CODE and "given twice" in twice.output


def test_a_table_is_of_one_run(tmp_path):
    result = _called("report", tmp_path / "a", tmp_path / "b", "--table")
    assert result.exit_code == EXIT_CODE and "one run" in result.output


def test_an_export_replaces_nothing_but_a_policy(tmp_path):
    run = _run(tmp_path / "run")
    PolicyFacts("run", 1, {}, "card").write((saved := tmp_path / "saved").mkdir() or saved)
    (tmp_path / "link").symlink_to(saved)
    (tmp_path / "file").write_text("kept")
    for output in (run, run / "logs", tmp_path / "file", tmp_path / "link", tmp_path, "/"):
        done = _called("export", run, output, "--overwrite")
        assert done.exit_code == EXIT_CODE
        assert "is no policy that rlpipe wrote, and --overwrite replaces nothing else" in done.output
    assert (tmp_path / "file").read_text() == "kept"
    assert "exists: choose another folder" in _called("export", run, saved).output
    assert "replaces nothing else" not in _called("export", run, saved, "--overwrite").output


def test_status_takes_rows_of_any_values(tmp_path):
    run = _run(tmp_path / "run")
    row = {"iteration": 3, "train/updates_skipped_count": "2", "time/step_seconds": [1], "train/loss": None}
    append_json_line(RunDirectory(run).metrics, row)
    done = _called("status", run)
    assert done.exit_code == 0, done.output
    assert "skipped" not in done.output


def test_the_example_in_each_help_names_what_is_there():
    """Options as the command has them; files that come along."""
    examples = []
    for command in _commands(typer.main.get_command(app)):
        if command.epilog and command.epilog.startswith("Example: rlpipe "):
            words = command.epilog.removeprefix("Example: rlpipe ").split()
            context = typer.main.get_command(app).make_context("rlpipe", list(words), resilient_parsing=False)
            examples.append(words)
            assert words[0] in context.command.list_commands(context)
            names = words[2 if words[1] in ("copy", "status", "cancel", "requeue") or words[0] == "commguard" else 1 :]
            command.make_context(words[0], list(names))
            assert all((ROOT / word).is_file() for word in names if word.endswith(".yaml")), words
    assert len(examples) >= 14


def _commands(group):
    for command in group.commands.values():
        yield from _commands(command) if hasattr(command, "commands") else [command]


def test_the_version_is_the_packages():
    assert _called("--version").output == f"rlpipe {rlpipe.__version__}\n"


def test_dry_runs_of_every_way_to_run_start_nothing(tmp_path):
    places = [f"run.directory={tmp_path}/runs", f"prepare.directory={tmp_path}/task", f"model.path={tmp_path}/m"]

    def dry_run(command, config, *overrides):
        return _called(command, ROOT / "configs" / "demo" / config, *places, *overrides, "--dry-run")

    for command, config in (("sft", "sft.yaml"), ("eval", "arithmetic.yaml"), ("train", "arithmetic.yaml")):
        result = dry_run(command, config)
        assert result.exit_code == 0 and "are fine" in result.output, result.output
    assert not (tmp_path / "runs").exists()
    assert "no `sft` section" in dry_run("sft", "arithmetic.yaml").output
    assert "eval.datasets is empty" in dry_run("eval", "arithmetic.yaml", "eval.datasets=[]").output


def test_health_asks_whether_the_runs_of_this_machine_move(tmp_path):
    run = tmp_path / "mine"
    (run / "logs").mkdir(parents=True)
    log = run / "logs" / "engine_0.log"
    log.write_text("decoding\n")
    (run / "metrics.jsonl").write_text("{}\n")

    def health(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["health", str(tmp_path), *options])
        return result.exit_code, result.output

    assert health() == (0, "no run goes on here\n")
    wrong = CliRunner().invoke(app, ["health", str(log)])
    assert (wrong.exit_code, f"{log} is no folder" in wrong.output) == (2, True)
    with run_lock(run):
        assert health()[0] == 0
        for path in (log, run / "metrics.jsonl"):
            os.utime(path, (time.time() - 5000, time.time() - 5000))
        code, said = health()
        assert code == EXIT_CODE and f"{run} has written nothing for 1 h 23 min" in said
        assert health("--silent-seconds", "6000")[0] == 0
        owner = json.loads(lock_path(run).read_text())
        lock_path(run).write_text(json.dumps(owner | {"host": "another"}))
        assert health() == (0, "no run goes on here\n")
    assert health() == (0, "no run goes on here\n")


def test_phases_of_compared_runs_are_means_of_their_trained_iterations(tmp_path):
    runs = [_run(tmp_path / name) for name in "ab"]
    for run in runs:
        append_json_line(RunDirectory(run).metrics, {"iteration": 3, "time/rollout_seconds": 9.0})
    assert _called("report", *runs, "--output", tmp_path / "page.html").exit_code == 0
    assert "<td>rollout</td><td>3.000</td><td>3.000</td>" in (tmp_path / "page.html").read_text()


def test_a_line_that_is_being_written_is_followed_to_its_end(tmp_path):
    run = _run(tmp_path / "a")
    log = run / "logs" / "engine_0.log"
    log.write_text("one\ntwo\nhal")
    assert list(run_logs(run, ["engine"], 2, follow=False)) == ["two", "hal"]
    followed = run_logs(run, ["engine"], 2, follow=True)
    assert next(followed) == "two"
    with log.open("a") as file:
        file.write("f\n")
    assert next(followed) == "half"


def test_the_time_that_is_left_is_told_by_the_newest_trained_iterations(tmp_path):
    run = _run(tmp_path / "a", iterations=0)
    RunDirectory(run).config.write_text("run: {name: a, iterations: 50}\n")
    for iteration in range(31):
        seconds = 9000.0 if iteration == 0 else 500.0 if iteration < 21 else 3.0
        append_json_line(RunDirectory(run).metrics, {"iteration": iteration, "time/step_seconds": seconds})
    with run_lock(run):
        assert "3.00 s, about 1 min 00 s left" in _called("status", run).output
    short = _run(tmp_path / "b", iterations=0)
    for iteration, seconds in enumerate((9000.0, 3.0, 5.0)):
        append_json_line(RunDirectory(short).metrics, {"iteration": iteration, "time/step_seconds": seconds})
    assert "4.00 s" in _called("status", short).output


def test_an_export_that_the_disk_has_no_room_for_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    for free in (100, 99):
        monkeypatch.setattr("shutil.disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        with nullcontext() if free == 100 else pytest.raises(ResourceError, match="but the policy takes about"):
            _check_disk(tmp_path, tmp_path / "new" / "policy")
