"""A grading service that answers, stalls, fails and lies, on loopback."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import rewards
from rewards.grading_pool import GradingPool
from rlpipe.shared.errors import ConfigError


class Service(BaseHTTPRequestHandler):
    calls: Counter[str]
    at_once = 0
    most_at_once = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.strip("/")
        with Service.lock:
            Service.calls[kind] += 1
            calls = Service.calls[kind]
        with suppress(BrokenPipeError, ConnectionResetError):
            getattr(self, f"_{kind}")(body, calls)

    def _answer(self, status: int, content: object) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _echo(self, body: dict, calls: int) -> None:
        self._answer(200, {"score": float(body["label"]), "correct": True, "reason": body["prompt"]})

    def _number(self, body: dict, calls: int) -> None:
        self._answer(200, 0.5)

    def _slow(self, body: dict, calls: int) -> None:
        with Service.lock:
            Service.at_once += 1
            Service.most_at_once = max(Service.most_at_once, Service.at_once)
        time.sleep(0.2)
        with Service.lock:
            Service.at_once -= 1
        self._answer(200, 1.0)

    def _flaky(self, body: dict, calls: int) -> None:
        self._answer(503 if calls < 4 else 200, 1.0)

    def _hangs_up(self, body: dict, calls: int) -> None:
        if calls < 3:
            self.connection.close()
        else:
            self._answer(200, 1.0)

    def _broken(self, body: dict, calls: int) -> None:
        self._answer(500, "no")

    def _refuses(self, body: dict, calls: int) -> None:
        self._answer(401, "no")

    def _lies(self, body: dict, calls: int) -> None:
        self._answer(200, {"points": 1})

    def _stalls(self, body: dict, calls: int) -> None:
        stopped.wait(60)

    def _drips(self, body: dict, calls: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        while not stopped.wait(0.05):
            self.wfile.write(b" ")

    def log_message(self, *_: object) -> None:
        pass


stopped = threading.Event()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    Service.calls = Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    stopped.set()
    server.shutdown()
    server.server_close()


FAST = {"first_wait_seconds": 0.01, "longest_wait_seconds": 0.05, "deadline_seconds": 30.0}


def test_a_service_gives_score_verdict_and_reason(url: str) -> None:
    reward = rewards.grade("remote", "r", "0.75", url=url + "echo", prompt="p")
    assert (reward.score, reward.correct, reward.reason) == (0.75, True, "p")
    assert rewards.grade("remote", "r", "", url=url + "number").score == 0.5


@pytest.mark.parametrize(("kind", "calls"), [("flaky", 4), ("hangs_up", 3)])
def test_what_may_pass_is_tried_again(url: str, kind: str, calls: int) -> None:
    assert rewards.grade("remote", "r", "1", url=url + kind, **FAST).score == 1.0
    assert Service.calls[kind] == calls


def test_failures_cost_one_sample_each_and_are_counted(url: str) -> None:
    with GradingPool(score_on_failure=-1.0) as pool:
        options = {kind: {"url": url + kind, "attempts": 3, **FAST} for kind in ("broken", "refuses", "lies")}
        options |= {kind: {"url": url + kind, "deadline_seconds": 1.0} for kind in ("stalls", "drips")}
        options["nobody"] = {"url": "http://127.0.0.1:9/", "attempts": 2, **FAST}
        futures = {kind: pool.submit(kind, "remote", "r", "1", given) for kind, given in options.items()}
        good = pool.submit("good", "remote", "r", "1", {"url": url + "echo"}, facts={"prompt": "p", "metadata": {}})
        assert good.result(timeout=400).score == 1.0
        assert {future.result(timeout=400).score for future in futures.values()} == {-1.0}
        failures = pool.take_failures()
    assert sorted(failures.timeouts) == ["drips", "stalls"]
    assert sorted(failures.errors) == ["broken", "lies", "nobody", "refuses"]
    assert (Service.calls["broken"], Service.calls["refuses"], Service.calls["lies"]) == (3, 1, 1)


def test_many_are_out_at_once_but_not_more_than_allowed(url: str) -> None:
    Service.most_at_once = 0
    with GradingPool(remote_connections=8) as pool:
        futures = [pool.submit(f"s{i}", "remote", "r", "1", {"url": url + "slow"}) for i in range(40)]
        assert sum(future.result(timeout=400).score for future in futures) == 40.0
    assert 2 <= Service.most_at_once <= 8


def test_closing_does_not_wait_for_a_service_that_stalls(url: str) -> None:
    pool = GradingPool()
    future = pool.submit("s", "remote", "r", "1", {"url": url + "stalls", "deadline_seconds": 1000.0})
    pool.close()
    assert future.result(timeout=1).reason == "the pool was closed"


def test_options_are_checked_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="http"):
        rewards.check_grader("remote", {"url": "localhost:80"})
    with pytest.raises(ConfigError, match="atempts"):
        rewards.check_grader("remote", {"url": "http://x", "atempts": 3})
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN"):
        rewards.check_grader("remote", {"url": "http://x", "token_variable": "NO_SUCH_TOKEN"})
    for options in ({"url": 5}, {"url": "http://x", "attempts": True}, {"url": "http://x", "deadline_seconds": "1"}):
        with pytest.raises(ConfigError, match="grader 'remote': option .* should be a valid"):
            rewards.check_grader("remote", options)


def test_a_service_that_nobody_can_ask_is_refused_at_start(url: str) -> None:
    rewards.check_grader("remote", {"url": url + "echo"})
    rewards.check_grader("weighted", {"parts": [{"name": "remote", "options": {"url": url + "echo"}}]})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match="does not answer within 0.1 seconds"):
            rewards.check_grader("remote", {"url": f"http://127.0.0.1:{port}/", "deadline_seconds": 0.1})
    for wrong in (f"http://127.0.0.1:{port}/", "http://", "http://[::1/", "http://a:b/", "http://no such host/"):
        with pytest.raises(ConfigError, match="cannot be reached"):
            rewards.check_grader("remote", {"url": wrong})
