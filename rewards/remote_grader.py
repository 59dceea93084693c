"""Grading by a service over HTTP."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlpipe.shared.errors import ConfigError, RlpipeError
from rlpipe.shared.named_function import type_problem
from rlpipe.shared.sample import Reward

_CHECK_SECONDS = 30.0


@dataclass(frozen=True)
class Service:
    """A grading service and how patiently it is asked.

    Connection errors and the statuses 408, 429 and 5xx are retried, at most `attempts` times in all, after random
    waits that grow exponentially from `first_wait_seconds` to `longest_wait_seconds`. All of it, waits and a server
    that sends one byte a minute included, takes at most `deadline_seconds`. `token_variable` names the environment
    variable that holds a bearer token.
    """

    url: str
    attempts: int = 10
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 10.0
    deadline_seconds: float = 60.0
    token_variable: str | None = None


class ServiceError(RlpipeError):
    """The service did not answer, or said that it cannot now; worth another attempt."""


def remote(
    response: str,
    label: str,
    prompt: str = "",
    metadata: Mapping[str, object] | None = None,
    **service: Any,
) -> Reward:
    """The verdict of a `Service` (its fields are the options). In a `GradingPool` many responses are out at once."""

    async def once() -> Reward:
        async with client(connections=1) as http:
            return await ask(http, Service(**service), response, label, prompt, metadata or {})

    return asyncio.run(once())


def client(connections: int) -> httpx.AsyncClient:
    """An HTTP client for at most `connections` requests at a time. Time is limited by the deadline of `ask`."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=connections))  # nosec B113


async def ask(
    http: httpx.AsyncClient,
    service: Service,
    response: str,
    label: str,
    prompt: str,
    metadata: Mapping[str, object],
) -> Reward:
    """POST `{prompt, response, label, metadata}`; the answer is a number or `{score, correct, reason}`.

    Raises TimeoutError at the deadline, ServiceError when the last attempt failed, httpx.HTTPStatusError for a status
    that is not retried and ValueError for an answer of another form.
    """
    body = {"prompt": prompt, "response": response, "label": label, "metadata": dict(metadata)}
    variable = service.token_variable
    headers = {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(ServiceError),
        stop=stop_after_attempt(service.attempts),
        wait=wait_random_exponential(multiplier=service.first_wait_seconds, max=service.longest_wait_seconds),
        reraise=True,
    )
    async with asyncio.timeout(service.deadline_seconds):
        return _reward(await retrying(_post, http, service.url, body, headers), service.url)


def check_remote(**options: Any) -> None:
    """Raise ConfigError for options that no Service has, a url that is none or where nobody answers, or a token that is
    not there."""
    try:
        service = Service(**options)
    except TypeError as error:
        raise ConfigError(f"grader 'remote' with options {options!r}: {error}") from None
    if problem := type_problem(Service, options):
        raise ConfigError(f"grader 'remote': option {problem}")
    if service.attempts < 1 or min(service.deadline_seconds, service.first_wait_seconds) <= 0:
        raise ConfigError("grader 'remote': attempts, deadline_seconds and first_wait_seconds must be above 0")
    if not service.url.startswith(("http://", "https://")):
        raise ConfigError(f"grader 'remote': url {service.url!r} must start with http:// or https://")
    if service.token_variable and service.token_variable not in os.environ:
        raise ConfigError(f"grader 'remote': the environment variable {service.token_variable} is not set")
    _check_answers(service)


def _check_answers(service: Service) -> None:
    """Whatever the service says to a request without a response, even that it does not know such requests."""
    seconds = min(_CHECK_SECONDS, service.deadline_seconds)
    try:
        asyncio.run(_head(service.url, seconds))
    except TimeoutError:
        raise ConfigError(f"grader 'remote': {service.url} does not answer within {seconds:g} seconds") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"grader 'remote': {service.url} cannot be reached ({type(error).__name__}: {error}); start the service "
            "or correct the url"
        ) from None


async def _head(url: str, seconds: float) -> None:
    async with asyncio.timeout(seconds), client(connections=1) as http, http.stream("HEAD", url):
        pass


async def _post(http: httpx.AsyncClient, url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> Any:
    try:
        answer = await http.post(url, json=body, headers=headers)
    except httpx.TransportError as error:
        raise ServiceError(f"{url}: {type(error).__name__} {error}") from error
    if answer.status_code in (408, 429) or answer.status_code >= 500:
        raise ServiceError(f"{url} answered {answer.status_code}")
    answer.raise_for_status()
    return answer.json()


def _reward(answer: Any, url: str) -> Reward:
    if isinstance(answer, int | float):
        return Reward(float(answer), None, f"score of {url}")
    if not isinstance(answer, Mapping) or not isinstance(answer.get("score"), int | float):
        raise ValueError(f"{url} answered {str(answer)[:100]!r}, neither a number nor an object with a score")
    correct = answer.get("correct")
    return Reward(float(answer["score"]), None if correct is None else bool(correct), str(answer.get("reason", url)))
