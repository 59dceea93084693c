"""A whole run with planted secrets: no socket of it can be reached from outside, nothing of it shows a secret."""

import ipaddress
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from run_support import (
    PROJECT,
    assert_no_process_is_left,
    marked_processes,
    metric_rows,
    run_arguments,
    start_command,
)

from rlpipe.config.load import load_config
from rlpipe.config.save import resolved_yaml
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.secret_text import HIDDEN, Secrets, hide_in_tree, is_secret_key
from tests.search_path import search_path

PLANTED = {name: f"planted{secrets.token_hex(12)}" for name in ("environment", "option", "password", "parameter")}


def _listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses at which they listen."""
    found = set()
    for process in processes:
        try:
            found |= {one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            yield " ".join([process.name(), *process.cmdline()])
        except psutil.Error:
            continue


def _config_with_secrets(folder: Path) -> Path:
    options = {
        "api_key": PLANTED["option"],
        "url": f"http://user:{PLANTED['password']}@localhost/grade?access_token={PLANTED['parameter']}",
    }
    path = folder / "secret.yaml"
    content = {
        "base": str(PROJECT / "configs/demo/arithmetic.yaml"),
        "reward": {"name": "tests.rlpipe.leaking_grader:tell", "options": options},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_run_listens_at_the_loopback_only_and_tells_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It generates while it trains, which no other of the quick tests does in a whole run."""
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["environment"])
    monkeypatch.setenv("SERVICE_PASSWORD", PLANTED["environment"])
    settings = ["trackers.wandb=offline", "trackers.tensorboard=true", "rollout.mode=one_step_off"]
    _, *arguments = run_arguments(tmp_path / "runs", *settings, "algorithm.old_policy=rollout")
    arguments = [one for one in arguments if not one.startswith("reward.name=")]
    mark = uuid.uuid4().hex
    run = start_command("train", str(_config_with_secrets(tmp_path)), *arguments, "actor.processes=2", mark=mark)
    listening: set[str] = set()
    names: set[str] = set()
    shown: set[str] = set()
    try:
        while run.poll() is None:
            processes = marked_processes(mark)
            names |= {process.name().partition(" ")[0] for process in processes if process.is_running()}
            listening |= _listening(processes)
            shown |= {one for one in _command_lines() if any(secret in one for secret in PLANTED.values())}
            time.sleep(0.5)
    finally:
        run.kill()
    output = run.stdout.read() if run.stdout else ""
    assert run.returncode == 0, output
    assert {"gcs_server", "raylet"} <= names and any("sglang" in name for name in names), names
    assert listening
    assert {ip for ip in listening if not _is_loopback(ip)} == set()
    assert shown == set()
    assert not any(secret in output for secret in PLANTED.values())
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert {"config.yaml", "samples.jsonl", "report.html"} <= {path.name for path in files}
    leaks = [path for path in files if any(secret.encode() in path.read_bytes() for secret in PLANTED.values())]
    assert leaks == []
    assert HIDDEN in (tmp_path / "runs/small/samples.jsonl").read_text()
    rows = metric_rows(tmp_path / "runs/small")[-4:]
    assert [row["rollout/weight_version_lag_max"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/off_policy_share"] for row in rows] == [0, 1, 1, 1]
    assert_no_process_is_left(mark)


def test_the_store_of_the_actor_listens_at_its_address() -> None:
    from actor import distributed

    store = distributed.open_store("127.0.0.1", 1, 30)
    ends = [one for one in psutil.Process().net_connections("inet") if one.laddr and one.laddr.port == store.port]
    assert {one.laddr.ip for one in ends if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    other = distributed.join_store("127.0.0.1", store.port, 1, 30)
    other.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    "override",
    ["reward.options.api_key=abcd", "reward.options={api_key: abcd}", "reward.options.url=http://user:abcd@host"],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(ConfigError, match="list of processes") as found:
        load_config(PROJECT / "configs/demo/arithmetic.yaml", [override])
    assert "abcd" not in str(found.value)


def test_secrets_for_all_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN is a secret"):
        load_config(PROJECT / "configs/demo/arithmetic.yaml", ["ray.environment={HF_TOKEN: ''}"])


def test_a_saved_configuration_holds_no_secret(tmp_path: Path) -> None:
    config = load_config(_config_with_secrets(tmp_path))
    saved = resolved_yaml(config)
    assert not any(secret in saved for secret in PLANTED.values())
    assert yaml.safe_load(saved)["rollout"]["engine"]["max_running_requests"] == 512


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("api_key", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password")),
        *((name, False) for name in ("max_tokens", "experts_per_token", "pad_token", "token_variable", "monkey")),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret_key(name) is secret
    assert (hide_in_tree({name: "value"})[name] == HIDDEN) is secret


@pytest.mark.parametrize(
    "text",
    [
        "options {'url': 'http://u:MINE@h/x', 'k': 1}",
        "http://h/x?a=1&api_key=MINE",
        "Authorization: Bearer MINE-and-more",
        '{"password": "MINE"}',
        "api_key=MINE, x",
        "planted by value: MINE-and-more",
    ],
)
def test_secrets_in_sentences_are_hidden(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "MINE-and-more")
    assert "MINE" not in Secrets().hide(text)


def test_a_traceback_shows_no_secret() -> None:
    program = "from rlpipe.shared.secret_text import hide_in_tracebacks as hide\nhide()\nraise ValueError('abcdefgh1')"
    environment = {**os.environ, "PYTHONPATH": search_path(), "MY_TOKEN": "abcdefgh1"}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "ValueError" in found.stderr
    assert "abcdefgh1" not in found.stderr.partition("ValueError: ")[2]


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["x", "a.", "a-", "?a", "token ", "a://", "_token_", "Bearer "])
def test_long_text_takes_no_longer_than_its_length(text: str) -> None:
    """Of a model: a search that begins again at each letter would take an hour."""
    long = text * (2**20 // len(text))
    assert Secrets().hide(long + " https://user:password@host").endswith(" https://<hidden>@host")
