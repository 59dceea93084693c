"""A pool of grading processes with a hard time limit per response.

One thread of the caller owns one process: it hands over a response, waits at most the time limit, and kills and
replaces the process if it is late or dead. Nothing is shared between processes, so that one that is killed in the
middle of anything cannot block another. A grader that hangs, crashes or raises costs its sample and nothing else.
"""

import logging
import queue
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from rewards.grading_channel import ForgedAnswer, reward_from_json
from rewards.grading_process import WorkerProcess
from rewards.lane import RemoteLane
from rlpipe.config.reward import GRADER_ENVIRONMENT, RewardConfig
from rlpipe.shared.errors import ResourceError
from rlpipe.shared.sample import Reward
from rlpipe.shared.secret_text import Secrets

_START_SECONDS = 120.0
_START_ATTEMPTS = 3
_START_PAUSE_SECONDS = 1.0
_REMOTE = "remote"
_OF_THE_PROCESS = ("MemoryError", "ConfigError")
"""How errors begin that say more of a used process than of the response: no memory, a module no longer loads."""
_TOLD_FAILURES = 5
"""Of a grader, each with its reason, until failures are taken the next time; a broken one fails for every response."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failures:
    """Ids of the samples whose grading met the time limit, and of those whose grader raised or crashed."""

    timeouts: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Request:
    sample_id: str
    grader: str
    arguments: tuple[Any, ...]
    future: "Future[Reward]"


class GradingPool:
    """Grades in `workers` processes. Use as a context manager; leaving it ends every process.

    `timeout_seconds` is the time limit of one response, `score_on_failure` the score of a response that met it or
    whose grader failed, `memory_bytes` the address space of a worker, `environment` the names (or patterns with `*`) of
    the environment variables that graders see; `secrets` never appear in a reason. Starting does not block: the
    processes import their libraries while the first responses are generated. Responses for the grader `remote` go to no
    process: up to `remote_connections` of them are out at a time, each within the deadline of its service.
    """

    def __init__(
        self,
        workers: int = 1,
        timeout_seconds: float = 10.0,
        score_on_failure: float = 0.0,
        memory_bytes: int = 4 * 2**30,
        remote_connections: int = 64,
        environment: Sequence[str] = GRADER_ENVIRONMENT,
        secrets: Secrets | None = None,
    ) -> None:
        self._lane: RemoteLane | None = None
        self._remote_connections = remote_connections
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        hidden = secrets or Secrets()
        self._journal = _Journal(score_on_failure, hidden)
        self._owners = [
            _Owner(
                number,
                self._requests,
                self._closing,
                self._journal,
                timeout_seconds,
                lambda: WorkerProcess(memory_bytes, environment, hidden),
            )
            for number in range(workers)
        ]
        for owner in self._owners:
            owner.start()

    def submit(
        self,
        sample_id: str,
        grader: str,
        response: str,
        label: str,
        options: Mapping[str, object] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> "Future[Reward]":
        """Queue one response and return at once.

        The future's result is a Reward whatever the grader does; it raises ResourceError only if no worker starts.
        """
        if self._closing.is_set():
            raise RuntimeError("the grading pool is closed")
        if grader == _REMOTE:
            return self._submit_remote(sample_id, response, label, options or {}, facts or {})
        arguments = (grader, response, label, dict(options or {}), dict(facts or {}))
        request = _Request(sample_id, grader, arguments, Future())
        self._requests.put(request)
        return request.future

    def _submit_remote(
        self, sample_id: str, response: str, label: str, options: Mapping[str, object], facts: Mapping[str, object]
    ) -> "Future[Reward]":
        if self._lane is None:
            self._lane = RemoteLane(self._remote_connections)
        graded: Future[Reward] = Future()
        graded.set_running_or_notify_cancel()

        def finish(asked: "Future[Reward]") -> None:
            graded.set_result(self._verdict(sample_id, asked))

        self._lane.submit(response, label, options, facts).add_done_callback(finish)
        return graded

    def _verdict(self, sample_id: str, asked: "Future[Reward]") -> Reward:
        if asked.cancelled():
            return self._journal.error(sample_id, _REMOTE, "the pool was closed")
        error = asked.exception()
        if error is None:
            return self._journal.graded(asked.result())
        if isinstance(error, TimeoutError):
            return self._journal.timeout(sample_id, _REMOTE, "the service met the deadline")
        return self._journal.error(sample_id, _REMOTE, f"{type(error).__name__}: {error}")

    def take_failures(self) -> Failures:
        """Failures since the last call."""
        return self._journal.take()

    def close(self) -> None:
        """Cancel what is queued, end every process and wait until it is gone. May be called twice."""
        self._closing.set()
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        for owner in self._owners:
            self._requests.put(None)
            owner.interrupt()
        for owner in self._owners:
            owner.join()
        while not self._requests.empty():
            request = self._requests.get()
            if request is not None:
                request.future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Journal:
    """What failed, collected from all owners; what it says holds no secret."""

    def __init__(self, score_on_failure: float, secrets: Secrets) -> None:
        self._score_on_failure = score_on_failure
        self._secrets = secrets
        self._lock = threading.Lock()
        self._timeouts: list[str] = []
        self._errors: list[str] = []
        self._told: Counter[str] = Counter()

    def graded(self, reward: Reward) -> Reward:
        """The reward as it may be logged."""
        return replace(reward, reason=self._secrets.hide(reward.reason))

    def timeout(self, sample_id: str, grader: str, reason: str) -> Reward:
        return self._failed(sample_id, grader, reason, self._timeouts)

    def error(self, sample_id: str, grader: str, reason: str) -> Reward:
        return self._failed(sample_id, grader, reason, self._errors)

    def take(self) -> Failures:
        with self._lock:
            failures = Failures(tuple(self._timeouts), tuple(self._errors))
            self._timeouts.clear()
            self._errors.clear()
            told, self._told = self._told, Counter()
        for grader, count in told.items():
            if count > _TOLD_FAILURES:
                _LOG.warning("grader %s: %d responses more could not be graded", grader, count - _TOLD_FAILURES)
        return failures

    def _failed(self, sample_id: str, grader: str, reason: str, failures: list[str]) -> Reward:
        reason = self._secrets.hide(reason)
        with self._lock:
            failures.append(sample_id)
            self._told[grader] += 1
            told = self._told[grader]
        if told <= _TOLD_FAILURES:
            _LOG.warning("sample %s, grader %s: %s", sample_id, grader, reason)
        return Reward(score=self._score_on_failure, correct=None, reason=reason, failed=True)


class _Owner(threading.Thread):
    """The thread that owns one process: starts it, feeds it, replaces it, ends it."""

    def __init__(
        self,
        number: int,
        requests: "queue.SimpleQueue[_Request | None]",
        closing: threading.Event,
        journal: _Journal,
        timeout_seconds: float,
        start: Callable[[], WorkerProcess],
    ) -> None:
        super().__init__(name=f"grading-{number}", daemon=True)
        self._requests = requests
        self._closing = closing
        self._journal = journal
        self._timeout_seconds = timeout_seconds
        self._start = start
        self._worker: WorkerProcess | None = None

    def run(self) -> None:
        while not self._closing.is_set():
            failure = self._ensure_worker()
            request = self._requests.get()
            if request is None:
                break
            if not request.future.set_running_or_notify_cancel():
                continue
            if failure is not None:
                request.future.set_exception(failure)
                continue
            try:
                request.future.set_result(self._grade(request))
            except Exception as error:  # this thread is the only one that answers: its end would be waited for for ever
                request.future.set_exception(error)
        self._end_worker()

    def interrupt(self) -> None:
        """Called by another thread: end a grading that is under way."""
        worker = self._worker
        if worker is not None:
            worker.kill()

    def _ensure_worker(self) -> ResourceError | None:
        """Have a ready process, ahead of the next request so that its start is nobody's waiting time."""
        refusal = ""
        for _ in range(_START_ATTEMPTS):
            if self._worker is not None or self._closing.is_set():
                return None
            try:
                self._worker = self._start()
            except OSError as error:
                refusal = str(error.strerror)
                self._closing.wait(_START_PAUSE_SECONDS)
                continue
            refusal = ""
            if self._closing.is_set():  # `interrupt` may have come too early to see this process
                return None
            try:
                self._worker.wait_until_ready(_START_SECONDS)
            except (TimeoutError, EOFError, OSError, ForgedAnswer):
                printed, code = self._worker.printed(), self._end_worker()
        if self._worker is not None:
            return None
        if refusal:
            return ResourceError(
                f"a grading process cannot be started ({refusal}): raise the machine's limits (ulimit -n and -u), or "
                "lower reward.workers"
            )
        return ResourceError(
            f"a grading process ended before it was ready, {_START_ATTEMPTS} times (exit code {code}): raise "
            f"reward.memory_bytes if it lacks memory, reward.environment if it lacks a variable; it printed {printed!r}"
        )

    def _grade(self, request: _Request) -> Reward:
        was_stopped, deaths = False, 0
        while True:
            worker = self._worker
            if worker is None:  # interrupted while closing
                return self._journal.error(request.sample_id, request.grader, "the pool was closed")
            used, died = worker.answered > 0, False
            try:
                answer = worker.ask(request.arguments, self._timeout_seconds)
            except TimeoutError:
                outside = worker.is_stopped() and not was_stopped
                self._end_worker()
                if outside and self._ensure_worker() is None:
                    was_stopped = True
                    continue
                late = f"grading took longer than {self._timeout_seconds:g} seconds"
                return self._journal.timeout(request.sample_id, request.grader, late)
            except (EOFError, OSError, ForgedAnswer) as error:
                forged, code = isinstance(error, ForgedAnswer), self._end_worker()
                died = not forged
                deaths += died
                reason = "it wrote into its connection" if forged else _describe(code)
                answer = {"error": f"the grading process died ({reason})"}
            else:
                if answer.get("worn") or worker.strays:
                    self._end_worker()
            # What an earlier response left in a used process may be why it failed, and one that died may have been
            # killed by somebody else: a fresh one has the last word.
            lost = self._worker is None or str(answer.get("error", "")).startswith(_OF_THE_PROCESS)
            doubtful = (used and lost) or (died and deaths == 1)
            if doubtful and "error" in answer and not self._closing.is_set():
                self._end_worker()
                if self._ensure_worker() is None:
                    continue
            return self._verdict(request, answer)

    def _verdict(self, request: _Request, answer: Mapping[str, Any]) -> Reward:
        try:
            if "reward" in answer:
                return self._journal.graded(reward_from_json(answer["reward"]))
        except ForgedAnswer:
            answer = {"error": "its answer has another form"}
        return self._journal.error(request.sample_id, request.grader, f"the grader failed: {answer.get('error')}")

    def _end_worker(self) -> int:
        worker, self._worker = self._worker, None
        return worker.end() if worker is not None else 0


def _describe(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def open_grading(settings: RewardConfig) -> GradingPool:
    """A pool as configured; closing it leaves no process."""
    return GradingPool(
        workers=settings.workers,
        timeout_seconds=settings.timeout_seconds,
        score_on_failure=settings.score_on_failure,
        memory_bytes=settings.memory_bytes,
        remote_connections=settings.remote_connections,
        secrets=Secrets(settings.model_dump(mode="json")),
        environment=[*settings.environment, *_token_variables(settings)],
    )


def _token_variables(settings: RewardConfig) -> Iterator[str]:
    """Names that parts of a `weighted` grader take tokens from: these ask their service in the grading process."""
    for options in (settings.options, *(grader.options for grader in settings.graders.values())):
        parts = options.get("parts")
        for part in parts if isinstance(parts, list) else ():
            variable = part.get("options", {}).get("token_variable") if isinstance(part, Mapping) else None
            if variable:
                yield str(variable)
