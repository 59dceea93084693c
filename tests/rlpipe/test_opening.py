"""Opening a run's folder: the lock, replacing, resuming with other settings, what is left of a run that never was."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from rlpipe.commands.export_policy import export_policy
from rlpipe.config.changes import FREE, config_changes
from rlpipe.config.load import iter_fields, validate
from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.config.strict_yaml import load_yaml
from rlpipe.monitoring.json_lines import append_json_line, read_json_lines
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_lock import lock_path, run_lock
from rlpipe.monitoring.trackers import open_trackers
from rlpipe.shared.checkpoint_folder import checkpoint_path, latest_checkpoint, partial_path, publish
from rlpipe.shared.errors import CheckpointError, ConfigError, DamagedCheckpointError, FileKindError, ResourceError
from rlpipe.training.opening import Opening, check_place, discard_replaced, open_run_directory

_RESUME = Opening(resume=True)


def _config(folder, **sections):
    tree = {
        "run": {"name": "r", "iterations": 4, "directory": str(folder / "runs")},
        "model": {"path": "policy"},
        "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return validate(tree, "test")


def _open(config, opening=Opening(), fingerprint="data", said=None):
    return open_run_directory(config, opening, fingerprint, (said if said is not None else []).append)


def _save(directory, iteration, data="data"):
    final = checkpoint_path(directory.checkpoints, iteration)
    partial_path(final).mkdir(parents=True)
    (partial_path(final) / "weights").write_bytes(b"weights")
    publish(partial_path(final), final, {"driver": {"iteration": iteration, "data": data}}, keep=9)
    return final


@pytest.fixture
def saved(tmp_path):
    """A run with a row and checkpoints of iterations 1 and 2."""
    with _open(_config(tmp_path)) as directory:
        append_json_line(directory.metrics, {"iteration": 1})
        _save(directory, 1)
        _save(directory, 2)
    return directory


def test_two_runs_of_one_name_do_not_meet(tmp_path):
    config = _config(tmp_path)
    with _open(config) as directory:
        append_json_line(directory.metrics, {"iteration": 1})
        for opening in (Opening(), Opening(overwrite=True), _RESUME):
            # flock is held by the open file, so another opening of it meets it in the same process too
            with pytest.raises(ResourceError, match=rf"going on \(process {os.getpid()} on .*\): wait for its end"):
                _open(config, opening).__enter__()
        assert read_json_lines(directory.metrics).rows == ({"iteration": 1},)
    with _open(config, Opening(overwrite=True)):
        pass
    assert not lock_path(directory.path).exists()


def test_a_run_has_its_folder_where_it_is_told(tmp_path):
    assert RunDirectory.of(_config(tmp_path)).path == tmp_path / "runs/r"


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    code = "import sys, time; from pathlib import Path; from rlpipe.monitoring.run_lock import run_lock\n"
    code += "with run_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ResourceError, match=f"process {process.pid}"), run_lock(tmp_path / "r"):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.stdout.close()
    with run_lock(tmp_path / "r"):
        pass


def test_only_one_of_many_starts_gets_the_lock(tmp_path):
    context = multiprocessing.get_context("forkserver")
    with context.Pool(6) as pool:
        holders = pool.map(_hold_and_count, [str(tmp_path / "r")] * 60, chunksize=1)
    assert set(holders) <= {0, 1} and 1 in holders


def _hold_and_count(folder):
    """0 if the lock was taken, else how many hold it by another lock inside."""
    from pathlib import Path

    try:
        with run_lock(Path(folder)), open(f"{folder}.inner", "w") as inner:
            fcntl.flock(inner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError fails the test
            return 1
    except ResourceError:
        return 0


@pytest.mark.parametrize("error", [ResourceError("no"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_run_that_never_was_leaves_nothing(tmp_path, error):
    config = _config(tmp_path)
    with pytest.raises(type(error)), _open(config) as directory:
        directory.logs.mkdir()
        (directory.logs / "empty.log").touch()
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "leave",
    [
        lambda directory: append_json_line(directory.metrics, {"iteration": 1}),
        lambda directory: directory.policy.mkdir(),
        lambda directory: _save(directory, 1),
    ],
    ids=["a row", "a policy", "a checkpoint"],
)
def test_a_run_that_left_something_stays(tmp_path, leave):
    with pytest.raises(ResourceError), _open(_config(tmp_path)) as directory:
        leave(directory)
        raise ResourceError("no")
    assert directory.config.exists() and len(list(directory.path.iterdir())) == 2


def test_logs_of_a_failed_start_stay_and_are_no_run(tmp_path):
    config = _config(tmp_path)
    with pytest.raises(ResourceError), _open(config) as directory:
        directory.logs.mkdir()
        (directory.logs / "engine.log").write_text("why")
        raise ResourceError("no")
    assert [path.name for path in directory.path.rglob("*")] == ["logs", "engine.log"]
    with _open(config):
        pass


def test_a_replaced_run_comes_back_when_the_new_one_never_began(saved, tmp_path):
    config = _config(tmp_path, seed=7)
    with pytest.raises(ResourceError), _open(config, Opening(overwrite=True)) as directory:
        assert not directory.metrics.exists()
        raise ResourceError("no")
    assert latest_checkpoint(saved.checkpoints) and load_yaml(saved.config.read_text())["seed"] == 0
    with _open(config, Opening(overwrite=True)) as directory:
        discard_replaced(directory)
        append_json_line(directory.metrics, {"iteration": 1})
    assert latest_checkpoint(saved.checkpoints) is None and load_yaml(saved.config.read_text())["seed"] == 7
    assert [path.name for path in saved.path.parent.iterdir()] == ["r"]


def test_a_kill_while_a_run_is_replaced_loses_nothing(saved, tmp_path):
    opened = _open(_config(tmp_path), Opening(overwrite=True))
    opened.__enter__()
    saved.path.rename(tmp_path / "aside")  # as a kill leaves it: the new folder, and the old one under a hidden name
    hidden = saved.path.with_name(".r.replaced")
    hidden.rename(tmp_path / "old")
    opened.__exit__(None, None, None)
    (tmp_path / "aside").rename(saved.path)
    (tmp_path / "old").rename(hidden)
    with pytest.raises(ConfigError, match="already holds a run"):
        _open(_config(tmp_path)).__enter__()
    assert latest_checkpoint(saved.checkpoints) and not hidden.exists()


def test_what_is_left_of_a_replaced_run_never_takes_the_place_of_one_that_has_begun(saved, tmp_path):
    hidden = saved.path.with_name(".r.replaced")
    hidden.mkdir()
    (hidden / "config.yaml").write_text("of the run before")
    with _open(_config(tmp_path), _RESUME) as directory:
        assert latest_checkpoint(directory.checkpoints).name == "iteration_00000002"
    assert not hidden.exists()


def test_a_place_for_runs_that_cannot_be_made_is_named_and_a_look_leaves_nothing(tmp_path):
    check_place(_config(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(ConfigError, match=rf"run.directory: runs cannot be written into {tmp_path}/runs \(File exists"):
        check_place(_config(tmp_path))


def test_a_run_with_a_pipe_in_it_is_not_resumed_but_replaced(saved, tmp_path):
    os.mkfifo(saved.path / "pipe")
    with pytest.raises(FileKindError, match="r/pipe: is a pipe, and a file is needed there"):
        _open(_config(tmp_path), _RESUME).__enter__()
    with _open(_config(tmp_path), Opening(overwrite=True)) as directory:
        assert not (directory.path / "pipe").exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    for opening in (Opening(), Opening(overwrite=True)):
        with pytest.raises(ConfigError, match="exists and is no run"):
            _open(_config(tmp_path), opening).__enter__()
    assert (folder / "thesis.txt").read_text() == "mine"


def test_nothing_to_resume_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        _open(_config(tmp_path), _RESUME).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_newest_checkpoint_is_passed_over(saved, tmp_path):
    (latest_checkpoint(saved.checkpoints) / "weights").write_bytes(b"w")
    partial = partial_path(checkpoint_path(saved.checkpoints, 3))
    partial.mkdir()
    said = []
    with _open(_config(tmp_path), _RESUME, said=said) as directory:
        assert latest_checkpoint(directory.checkpoints).name == "iteration_00000001"
    assert said[0] == f"passed over {partial}: its writing was interrupted; removed"
    assert "weights has 1 bytes instead of 7" in said[1] and "passed over, and kept as" in said[1]
    assert [path.name for path in sorted(saved.checkpoints.iterdir())] == [
        ".iteration_00000002.damaged",
        "iteration_00000001",
    ]


def test_a_newest_checkpoint_without_its_state_is_passed_over_with_a_word(saved, tmp_path):
    newest = latest_checkpoint(saved.checkpoints)
    (newest / "state.json").unlink()
    said = []
    with _open(_config(tmp_path), _RESUME, said=said) as directory:
        assert latest_checkpoint(directory.checkpoints).name == "iteration_00000001"
    assert said == [
        f"warning: {newest} has no state.json; passed over, and kept as {newest.parent}/.{newest.name}.damaged"
    ]


def test_no_policy_is_exported_from_other_bytes_than_were_written(saved, tmp_path):
    newest = latest_checkpoint(saved.checkpoints)
    (newest / "weights").write_bytes(b"Weights")
    with pytest.raises(DamagedCheckpointError, match="weights differs from what was written"):
        export_policy(str(saved.path), tmp_path / "out")
    (newest / "state.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=f"no state.json; for an older one .* {saved.path}@1"):
        export_policy(str(saved.path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_done_is_said_to_be(saved, tmp_path):
    said = []
    with _open(_config(tmp_path, run={"iterations": 2}), _RESUME, said=said):
        pass
    assert said[0] == "iteration_00000002 is all that run.iterations = 2 asks for: raise it to train on"


def test_resume_from_a_named_checkpoint_sets_newer_ones_aside(saved, tmp_path):
    said = []
    with _open(_config(tmp_path), Opening(resume=True, checkpoint="1"), said=said) as directory:
        assert latest_checkpoint(directory.checkpoints).name == "iteration_00000001"
    assert said == [
        "iteration_00000002 is newer than iteration_00000001, and kept as "
        f"{saved.checkpoints / '.iteration_00000002.superseded'}"
    ]
    (saved.checkpoints / "iteration_00000001" / "weights").write_bytes(b"Weights")
    with pytest.raises(CheckpointError, match="weights differs from what was written: use another one"):
        _open(_config(tmp_path), Opening(resume=True, checkpoint="1")).__enter__()
    with pytest.raises(CheckpointError, match="no complete checkpoint '2'; there are: iteration_00000001"):
        _open(_config(tmp_path), Opening(resume=True, checkpoint="2")).__enter__()


def test_settings_that_keep_the_experiment_may_change_and_are_listed(saved, tmp_path):
    before = saved.config.read_text()
    config = _config(tmp_path, run={"iterations": 9}, rollout={"engines": 2}, deadlines={"train_seconds": 5.0})
    said = []
    with _open(config, _RESUME, said=said):
        pass
    changed = [line.removeprefix("changed since the run began: ") for line in said[:-1]]
    assert sorted(changed) == [
        "deadlines.train_seconds: 3600.0 -> 5.0",
        "rollout.engines: 1 -> 2",
        "run.iterations: 4 -> 9",
    ]
    assert (saved.path / "config.before.yaml").read_text() == before
    assert load_yaml(saved.config.read_text())["run"]["iterations"] == 9
    said.clear()
    with _open(config, _RESUME, said=said):
        assert said == []


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"seed": 3}, "seed"),
        ({"data": {"shuffle": False}}, "data.shuffle"),
        ({"data": {"train": [{"name": "t", "path": "other.jsonl"}]}}, "data.train"),
        ({"algorithm": {"clip_high": 0.3}}, "algorithm.clip_high"),
        ({"actor": {"optimizer": {"learning_rate": 0.1}}}, "actor.optimizer.learning_rate"),
        ({"model": {"path": "elsewhere"}}, "model.path"),
        ({"warm_start": {"steps": 3}}, "warm_start"),
        ({"rollout": {"engine": {"dtype": "float32"}}}, "rollout.engine.dtype"),
        ({"eval": {"datasets": [{"name": "e", "path": "e.jsonl"}]}}, "eval.datasets"),
        ({"rollout": {"sampling": {"temperature": 0.5}}}, "rollout.sampling.temperature"),
    ],
)
def test_settings_that_make_another_experiment_are_refused_unless_allowed(saved, tmp_path, sections, key):
    config = _config(tmp_path, **sections)
    before = {path: path.stat().st_mtime_ns for path in saved.path.rglob("*")}
    with pytest.raises(ConfigError, match=rf"another experiment: .*{key}.* --allow-change {key}"):
        _open(config, Opening(resume=True, checkpoint="1")).__enter__()
    assert {path: path.stat().st_mtime_ns for path in saved.path.rglob("*")} == before
    for allowed in (key, key.split(".")[0]):
        with _open(config, Opening(resume=True, allow_changes=(allowed,))):
            pass


def test_five_of_many_refused_changes_are_listed(saved, tmp_path):
    rates = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0}
    sections = {"seed": 3, "algorithm": rates, "data": {"shuffle": False}}
    for more, told in (({}, r"[^;]*; take the old"), ({"model": {"path": "elsewhere"}}, "; and 1 more; take the old")):
        with pytest.raises(ConfigError, match=rf"another experiment: ([^;]*; ){{4}}[^;]*{told}") as error:
            _open(_config(tmp_path, **sections, **more), _RESUME).__enter__()
        assert str(error.value).count("--allow-change") == 5


def test_more_iterations_change_the_learning_rates_of_a_decay(saved, tmp_path):
    given = load_yaml(resolved_yaml(_config(tmp_path, actor={"optimizer": {"schedule": "cosine"}})))
    longer = {**given, "run": {**given["run"], "iterations": 9}}
    (change,) = config_changes(given, longer, {})
    assert (change.key, change.free) == ("run.iterations", False)


def test_an_unknown_key_of_allow_change_is_named(saved, tmp_path):
    with pytest.raises(ConfigError, match=r"--allow-change 'sed': there is no such key; did you mean 'seed'\?"):
        _open(_config(tmp_path), Opening(resume=True, allow_changes=("sed",))).__enter__()


def test_other_training_data_in_the_same_file_are_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="the training data are not those that the run began with"):
        _open(_config(tmp_path), _RESUME, fingerprint="other").__enter__()
    with _open(_config(tmp_path), Opening(resume=True, allow_changes=("data",)), fingerprint="other"):
        pass


def test_a_damaged_configuration_is_one_sentence(saved, tmp_path):
    for text in ("run: {", "", "3"):
        saved.config.write_text(text)
        with pytest.raises(ConfigError, match=r"config.yaml: cannot be compared with the given configuration \("):
            _open(_config(tmp_path), _RESUME).__enter__()


def test_keys_that_another_version_did_not_know_count_as_their_defaults(tmp_path):
    given = load_yaml(resolved_yaml(_config(tmp_path)))
    older = {**given, "data": {key: value for key, value in given["data"].items() if key != "shuffle"}}
    other = {**given, "data": {**given["data"], "shuffle": False}}
    known = {"data": {"shuffle": True}}
    assert config_changes(older, given, known) == []
    assert [change.key for change in config_changes(older, other, known)] == ["data.shuffle"]


def test_every_free_key_exists():
    known = [name for name, _ in iter_fields(Config)]
    for section in FREE:
        assert any(name == section or name.startswith(f"{section}.") for name in known), section


def test_a_kill_while_rows_are_dropped_or_written_loses_none(tmp_path):
    code = (
        "import sys; from pathlib import Path; from rlpipe.monitoring.json_lines import *\n"
        "path = Path(sys.argv[1]); print('go', flush=True)\n"
        "while True:\n"
        "    append_json_line(path, {'iteration': 500, 'text': 'x' * 10_000}); drop_rows_from(path, 500)\n"
    )
    path = tmp_path / "metrics.jsonl"
    rows = tuple({"iteration": number, "text": "x" * 500} for number in range(500))
    for row in rows:
        append_json_line(path, row)
    for number in range(6):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"go\n"
        time.sleep(0.02 + 0.013 * number)
        process.kill()
        process.wait(20)
        process.stdout.close()
        assert read_json_lines(path).rows[:500] == rows


def test_a_full_disk_is_told_with_the_file(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from rlpipe.shared.atomic_file import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try: write_atomically(Path(sys.argv[1]), b'x' * 99)\n"
        "except OSError as error: print(error.filename, error.strerror)\n"
    )
    file = tmp_path / "report.html"
    file.write_text("old")
    told = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert told.stdout == f"{file} File too large\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.html", "old")]


def test_a_full_disk_tears_no_row(tmp_path):
    """With a limit of file sizes, which the kernel enforces as it does a full disk."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from rlpipe.monitoring.json_lines import append_json_line\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for n in range(99): append_json_line(Path(sys.argv[1]), {'iteration': n, 'text': 'x' * 100})\n"
    )
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "DiskFullError" in done.stderr and "free space there" in done.stderr
    found = read_json_lines(path)
    assert (len(found.rows), found.damaged) == (7, 0)
    assert path.read_bytes().endswith(b"\n")


def test_run_directories_are_named_by_the_configuration(tmp_path):
    assert RunDirectory.of(_config(tmp_path)).path == tmp_path / "runs" / "r"


def test_no_file_of_rows_keeps_an_iteration_that_is_made_again(tmp_path):
    directory = RunDirectory(tmp_path)
    files = (directory.metrics, directory.samples, directory.episodes, directory.responses)
    for path in files:
        for iteration in (1, 2, 3):
            append_json_line(path, {"iteration": iteration})
    with open_trackers(_config(tmp_path, trackers={"tensorboard": False}), directory, first_iteration=2):
        assert [[row["iteration"] for row in read_json_lines(path).rows] for path in files] == [[1]] * 4
