"""Engines that cannot start: one sentence each, and nothing left running."""

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rollout_models import save_dense
from rollout_requests import generate, make_requests
from safetensors.torch import load_file, save_file

from rlpipe.shared.errors import ConfigError, ModelError, ResourceError, RlpipeError, RolloutError
from rollout.failures import STARTS_AGAIN, first_failure, last_exception, log_tail, printed_since_start
from rollout.pool import RolloutPool


def sglang_processes() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "sglang" in child.name():
                found.add(child.pid)
    return found


def start_error(config, folder, logs) -> RlpipeError:
    before = sglang_processes()
    with RolloutPool.start(config, str(folder), log_directory=str(logs)) as pool, pytest.raises(RlpipeError) as caught:
        pool.wait_until_ready()
    assert sglang_processes() <= before
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.slow
def test_no_memory_for_the_kv_pool(ray_session, config_of, dense_folder, tmp_path):
    error = start_error(config_of(kv_cache_tokens=10**12), dense_folder, tmp_path)
    assert isinstance(error, ResourceError)
    assert "no free memory for a KV pool of 1000000000000 tokens" in str(error)


@pytest.mark.slow
def test_stop_strings_without_a_tokenizer(ray_session, config_of, tmp_path):
    folder = save_dense(tmp_path / "model", seed=0, tokenizer=False)
    error = start_error(config_of(sampling={"stop": ["."]}), folder, tmp_path)
    assert isinstance(error, ModelError)
    assert "no tokenizer" in str(error)


def test_a_folder_without_a_model(ray_session, config_of, tmp_path):
    error = start_error(config_of(), tmp_path, tmp_path / "logs")
    assert isinstance(error, ModelError)
    assert "no config.json" in str(error)


@pytest.mark.slow
def test_an_unknown_sglang_argument_names_the_nearest(ray_session, config_of, dense_folder, tmp_path):
    error = start_error(config_of(sglang={"schedule_polcy": "fcfs"}), dense_folder, tmp_path)
    assert isinstance(error, ConfigError)
    assert "did you mean 'schedule_policy'?" in str(error)


def test_attention_of_gpus_is_refused_on_a_cpu(config_of, dense_folder, tmp_path):
    with pytest.raises(ConfigError, match="attention_backend is 'triton', whose kernels need a GPU"):
        RolloutPool.start(config_of(sglang={"attention_backend": "triton"}), str(dense_folder))


@pytest.mark.slow
def test_engines_that_die_of_their_first_request_end_the_run_and_tell_of_what(
    ray_session, config_of, dense_folder, tmp_path
):
    """SGLang finds out what it lacks when it is asked for something, and so does every other engine."""
    config = config_of(sglang={"prefill_attention_backend": "triton", "decode_attention_backend": "triton"})
    with RolloutPool.start(config, str(dense_folder), log_directory=str(tmp_path)) as pool:
        pool.wait_until_ready()
        with pytest.raises(RolloutError, match="4 engines in a row were lost before any answered anything") as caught:
            generate(pool, make_requests(2, 4))
    assert "ended with exit code" in str(caught.value)
    assert re.search(r" after \w+(Error|Exception): ", str(caught.value))


@pytest.mark.slow
def test_a_model_with_a_nan_is_named_where_an_engine_fails_with_it(ray_session, config_of, tmp_path):
    folder = Path(save_dense(tmp_path / "model", seed=0))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with RolloutPool.start(config_of(), str(folder), log_directory=str(tmp_path)) as pool:
        pool.wait_until_ready()
        with pytest.raises(ModelError, match=rf"{name} in .* holds values that are not finite"):
            generate(pool, make_requests(2, new_tokens=4))


_LOG = """[2026-11-24 10:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    step()
{}
[2026-11-24 10:00:01] Received SIGQUIT
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ValueError: too long", "ValueError: too long"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("triton.runtime.errors.OutOfResources: shared memory", "OutOfResources: shared memory"),
        ("asyncio.exceptions.CancelledError", "CancelledError"),
    ],
)
def test_what_ended_a_traceback_is_told_whatever_its_name(line, said):
    assert last_exception(_LOG.format(line)) == said


def test_words_outside_of_a_traceback_are_no_exception():
    assert last_exception("Capturing\nServer: ready\nWarning: slow\n") is None


def test_of_several_exceptions_the_last_one_counts():
    text = _LOG.format("KeyboardInterrupt") + "ValueError: later\n"
    assert last_exception(text) == "ValueError: later"
    assert last_exception("ValueError: before\n" + _LOG.format("KeyboardInterrupt")) == "KeyboardInterrupt"


_RANK = """[2026-11-24 10:00:00 TP{}] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    start()
{}

[rank{}]: a warning of the process group
"""


def test_of_processes_that_wait_for_each_other_the_first_to_fail_is_told():
    """The other one fails because it is not heard of any more."""
    text = _RANK.format(0, "RuntimeError: no room", 0) + _RANK.format(1, "ValueError: rank 0 did not finish", 1)
    assert last_exception(text) == "ValueError: rank 0 did not finish"
    assert first_failure(text) == "RuntimeError: no room"
    assert first_failure("ValueError: of a request\n" + text) == "RuntimeError: no room"


def test_a_process_that_fails_first_is_found_before_many_others_and_their_last_words(tmp_path):
    log = tmp_path / "engine.log"
    others = "".join(_RANK.format(rank, "    waiting()\n" * 100 + "ValueError: late", rank) for rank in range(1, 8))
    log.write_text(_RANK.format(0, "RuntimeError: no room", 0) + others)
    assert "no room" not in log_tail(str(log), lines=200)
    assert first_failure(printed_since_start(str(log))) == "RuntimeError: no room"


def test_nothing_but_a_failed_process_is_one_that_failed_first():
    assert first_failure("ValueError: of a request\nCapturing\n") is None


def test_an_engine_that_starts_again_does_not_tell_of_the_one_before_it(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text(_RANK.format(0, "RuntimeError: of the lost one", 0))
    program = (
        "from rollout.engine_start import _redirect_output\n"
        f"_redirect_output({str(log)!r}, keep=True)\n"
        "raise MemoryError('of the new one')"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    assert log.read_text().startswith("[2026-11-24 10:00:00 TP0]") and STARTS_AGAIN in log.read_text()
    said = printed_since_start(str(log))
    assert first_failure(said) is None and last_exception(said) == "MemoryError: of the new one"


def test_a_log_that_is_not_there_says_nothing(tmp_path):
    assert printed_since_start(str(tmp_path / "none.log")) == ""
