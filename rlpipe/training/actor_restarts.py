"""Doing the work again, from the last checkpoint, when the actor was lost."""

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from rlpipe.config.fault import FaultConfig
from rlpipe.monitoring.console import Console
from rlpipe.shared.errors import ActorLostError


def actor_attempts(settings: FaultConfig, console: Console) -> Retrying:
    """`for attempt in actor_attempts(...)`: one, and up to `fault.actor_restarts` more after an ActorLostError. Each
    has to open what it needs anew; rows that are made again replace the earlier ones."""

    def tell(attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome else None
        number = f"{attempt.attempt_number} of {settings.actor_restarts}"
        console.say(f"{error}\nrestart {number} of the actor, from the last checkpoint or else from the beginning")

    return Retrying(
        retry=retry_if_exception_type(ActorLostError),
        stop=stop_after_attempt(settings.actor_restarts + 1),
        before_sleep=tell,
        reraise=True,
    )
