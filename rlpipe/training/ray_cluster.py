"""Ray: joining a cluster, or starting one on this machine and ending it."""

import functools
import importlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay

from rlpipe.config.root import Config
from rlpipe.shared.bytecode import bytecode_environment
from rlpipe.shared.descendants import adopt_orphans, descendants, end_descendants
from rlpipe.shared.errors import EXIT_CODE, ResourceError
from rlpipe.shared.interrupts import INTERRUPTED, INTERRUPTED_EXIT_CODE, finishing, raise_if_requested, shielded
from rlpipe.shared.overtime import if_longer_than
from rlpipe.shared.replaced_parts import relies_on, replaces
from rlpipe.shared.socket_folder import shorten_temporary_folder
from rlpipe.training.ray_exit import hold_silent_exits
from rlpipe.training.ray_watch import RayWatch, leave, system_processes

_LOOPBACK = replaces(
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    why="a cluster of this machine alone listens at the loopback; on Linux Ray has no other switch for it",
    drop_when="ray.init takes the address to listen at",
)
_TOKEN_MODE = relies_on(
    "ray._raylet:Config",
    why="Ray reads its token mode when it is imported, which may have been earlier",
    drop_when="ray.init reads it",
)
_SIGNALS = replaces(
    "ray._private.utils:set_sigterm_handler",
    "ray._private.worker:connect",
    why="ray.init puts handlers of SIGTERM in place that end the process without cleaning up",
    drop_when="ray.init leaves signal handlers alone",
)
_PRINTED = replaces(
    "ray._private.worker:print_to_stdstream",
    why="Ray prints a page about each of its processes that died; the run says it in a sentence",
    drop_when="that can be turned off",
)
relies_on(
    "ray._private.node:Node.__init__",
    texts=("timed out during startup",),
    why="Ray reports processes of its own that are slow to start as a bare Exception; only its text tells",
    drop_when="it raises an exception of its own",
)
relies_on(
    "ray._private.worker:init",
    texts=("raise ConnectionError(", ") from e"),
    why="what a head answered, or that it did not, is only in the cause of a ConnectionError",
    drop_when="a head that is not ready has an exception of its own",
)
relies_on(
    "ray._private.node:Node._init_gcs_client",
    texts=("Last connection error: {last_ex}",),
    why="a token that a head refuses is only in the last line of a traceback, in a text",
    drop_when="it raises what the head answered",
)

_CONNECT_SECONDS = 10.0
_NODES_POLL_SECONDS = 0.5
_INIT_GRACE_SECONDS = 20.0
_OBITUARIES = ("Raylet is terminated", "has been marked dead", "A worker died or was killed")
_AUTH_MODE = "RAY_AUTH_MODE"
_REFUSED = "InvalidAuthToken"


@contextmanager
def ray_cluster(config: Config, last_words: Callable[[], Iterable[str]] = tuple) -> Iterator[None]:
    """Joins `ray.address`, or starts a cluster on this machine that ends with the block, as do all processes that were
    started below this one within it.

    last_words: what to say after the cause when Ray itself is lost, which ends this process.
    """
    import ray

    _check_reachable(config.ray.address)
    adopt_orphans()
    _without_obituaries()
    known = [process.pid for process in descendants()]
    try:
        _join_or_start(config, known)
        watch = RayWatch(ray.get_runtime_context().gcs_address, system_processes(), last_words)
        watch.start()
        _hold_or_tell()
        try:
            _wait_for_nodes(config.ray.nodes, config.deadlines.start_seconds)
            yield
        finally:
            with shielded():
                watch.stop()
    finally:
        with shielded():
            ray.shutdown()
            end_descendants(known)


def _hold_or_tell() -> None:
    import ray

    if not hold_silent_exits():
        words = "where its library ends this process was not found, so a lost raylet may end the run without a word"
        print(f"ray {ray.__version__}: {words}; use the version of requirements/", file=sys.stderr, flush=True)


def _join_or_start(config: Config, known: Collection[int]) -> None:
    try:
        (_join_ray if config.ray.address else _start_ray)(config, known)
    except Exception as error:
        if not isinstance(error, (ConnectionError, ValueError, RuntimeError)) and not _is_slow_start(error):
            raise
        if not config.ray.address:
            fix = "free memory and processors, or raise deadlines.start_seconds"
            raise ResourceError(f"ray: no cluster on this machine: {_first_line(error)}; {fix}") from None
        fix = "check ray.address"
        if _is_refused(error):
            fix = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as its head has them"
        raise ResourceError(f"ray: no cluster at {config.ray.address}: {_answer(error)}; {fix}") from None


def _join_ray(config: Config, known: Collection[int]) -> None:
    """The port of a head is open before its raylet is there, on a busy host for minutes."""
    attempts = Retrying(
        retry=retry_if_exception(_is_slow_head),
        stop=stop_after_delay(config.deadlines.start_seconds),
        before_sleep=functools.partial(_tell_attempt, config.deadlines.start_seconds),
        reraise=True,
    )
    attempts(_init_ray, config, known, address=config.ray.address)


def _tell_attempt(limit_seconds: float, attempt: RetryCallState) -> None:
    error = attempt.outcome.exception() if attempt.outcome else None
    passed = f"{attempt.seconds_since_start or 0:.0f} of {limit_seconds:g} seconds have passed"
    print(f"ray: {_answer(error)}; trying again, {passed}", file=sys.stderr, flush=True)


def _start_ray(config: Config, known: Collection[int]) -> None:
    """Ray gives its own processes 30 seconds to start, too few on a busy machine; `deadlines.start_seconds` counts."""
    shorten_temporary_folder()
    attempts = Retrying(
        retry=retry_if_exception(_is_slow_start), stop=stop_after_delay(config.deadlines.start_seconds), reraise=True
    )
    with _on_loopback():
        attempts(
            _init_ray,
            config,
            known,
            address="local",  # not what another cluster has left in the environment or in Ray's folder
            num_cpus=config.ray.cpus or _workers(config) + 1,
            object_store_memory=config.ray.object_store_bytes,
            include_dashboard=False,
            _system_config=_patience(config.deadlines.start_seconds),
        )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """All processes of a cluster that starts in the block listen at the loopback, and answer only who has its token.

    It is how Ray starts on systems with a firewall that asks; on Linux there is no other switch for it.
    """
    ray_constants: Any = importlib.import_module("ray._private.ray_constants")
    before = _LOOPBACK.original()
    if _AUTH_MODE not in os.environ:
        os.environ[_AUTH_MODE] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        _read_auth_mode()
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _read_auth_mode() -> None:
    """Ray reads it when it is imported, which may have been earlier."""
    _TOKEN_MODE.original().initialize("")


def _patience(start_seconds: float) -> dict[str, int]:
    """Ray's own deadlines. By default a machine that is overloaded for a minute loses its only node."""
    return {
        "health_check_period_ms": 5_000,
        "health_check_timeout_ms": 60_000,
        "health_check_failure_threshold": 10,
        "worker_register_timeout_seconds": round(max(60.0, start_seconds)),
        "agent_register_timeout_ms": round(1000 * max(30.0, start_seconds)),
    }


def _init_ray(config: Config, known: Collection[int], **where: Any) -> None:
    """Leaves none of Ray's processes behind when it fails or is interrupted.

    An exception in the middle of connecting makes Ray's library abort the process when the interpreter ends, so a
    signal waits for it; a start that takes too long for that ends the process on the spot.
    """
    import ray

    limit_seconds = 2 * config.deadlines.start_seconds
    give_up = functools.partial(_give_up_start, limit_seconds, config.ray.address, known)
    environment = (bytecode_environment() if config.ray.address else {}) | config.ray.environment
    try:
        with _own_signal_handlers(), finishing(_INIT_GRACE_SECONDS), if_longer_than(limit_seconds, give_up):
            ray.init(
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=config.run.name,
                runtime_env={"env_vars": environment} if environment else None,
                **where,
            )
    except BaseException as error:
        with shielded():
            end_descendants(known, term_seconds=0)
            if isinstance(error, KeyboardInterrupt):
                leave(INTERRUPTED_EXIT_CODE, INTERRUPTED)
        raise
    raise_if_requested()


def _give_up_start(seconds: float, address: str | None, known: Collection[int]) -> None:
    """End this process: Ray's library waits without end, and takes no exception, for a raylet that is there and does
    not answer. Ray's own deadlines are shorter where it keeps them (`_patience`)."""
    end_descendants(known, term_seconds=0)
    load = os.getloadavg()[0]
    where, fix = "it started on this machine", "free memory and processors, or raise deadlines.start_seconds"
    if address:
        where, fix = f"the head at {address} takes connections", "look at the log of that head, or check ray.address"
    leave(EXIT_CODE, f"error: ray: {where} and did not answer within {seconds:g} seconds (load {load:.0f}); {fix}")


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """`ray.init` replaces the handler of SIGTERM, in Python when it begins and in C++ while it connects, by some that
    end the process without cleaning up. Ours stays, and what comes while it connects is delivered after it."""
    import ray._private.utils as utils
    import ray._private.worker as worker

    handler = signal.getsignal(signal.SIGTERM)
    set_handler, connect = _SIGNALS.original(0), _SIGNALS.original(1)

    def connected(*arguments: Any, **keywords: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            connect(*arguments, **keywords)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    utils.set_sigterm_handler, worker.connect = lambda handler: None, connected
    try:
        yield
    finally:
        utils.set_sigterm_handler, worker.connect = set_handler, connect


@functools.cache
def _without_obituaries() -> None:
    """Ray prints a page about each of its processes that died, raylets' inner state included, from a thread of its own.
    The run says it in a sentence; Ray's other messages still come through."""
    import ray._private.worker as worker

    original = _PRINTED.original()

    def printed(data: dict[str, Any], ignore_prefix: bool) -> None:
        if not any(text in line for line in data["lines"] for text in _OBITUARIES):
            original(data, ignore_prefix)

    worker.print_to_stdstream = printed


def _is_slow_start(error: BaseException) -> bool:
    """Ray reports processes of its own that are slow to start as a bare Exception."""
    return type(error) is Exception and "timed out during startup" in str(error)


def _is_slow_head(error: BaseException) -> bool:
    """Without a cause, `ray.init` did not ask a head: it found none, or was told something that it cannot do."""
    return isinstance(error, ConnectionError) and error.__cause__ is not None and not _is_refused(error)


def _is_refused(error: BaseException) -> bool:
    return _REFUSED in str(error.__cause__)


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "")


def _answer(error: BaseException | None) -> str:
    """What a head answered to `ray.init`, without the traceback that Ray puts before it."""
    cause = next(reversed(str(error.__cause__).splitlines()), "") if error and error.__cause__ else ""
    return ": ".join(filter(None, (_first_line(error), cause.split(". ")[0])))


def _wait_for_nodes(wanted: int, deadline_seconds: float) -> None:
    import ray

    end = time.monotonic() + deadline_seconds
    while len(there := sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])) < wanted:
        if time.monotonic() > end:
            raise ResourceError(
                f"ray: {len(there)} of {wanted} nodes joined within {deadline_seconds:g} seconds ({', '.join(there)}); "
                "see the log of the missing ones, or lower ray.nodes"
            )
        time.sleep(_NODES_POLL_SECONDS)


def _workers(config: Config) -> int:
    engines = config.actor.processes if config.ray.colocate else config.rollout.engines
    return config.actor.processes + engines


def _check_reachable(address: str | None) -> None:
    """Ray itself goes on trying for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ResourceError(f"ray: no cluster at {address}: {error}; check ray.address") from None
