"""The guard of a worker process as its configuration wants it."""

import logging
from pathlib import Path
from typing import Protocol

import torch

from actor.comm_guard.guard import CommGuard
from actor.comm_guard.observer import Observer
from actor.comm_guard.probe import CudaDriver
from actor.comm_guard.rules import DEFAULT_RULES, Policy, Stack, Threshold, load_policy
from actor.comm_guard.stack import present_stack
from rlpipe.config.comm_guard import CommGuardConfig
from rlpipe.shared.errors import ConfigError

_log = logging.getLogger(__name__)


class Guard(Protocol):
    """What is installed, whatever its mode."""

    def take(self) -> dict[str, float]:
        """Metrics since the last call, at the end of an iteration."""

    def uninstall(self) -> None:
        """Hear of no collective any more."""


class _Off:
    def take(self) -> dict[str, float]:
        return {}

    def uninstall(self) -> None:
        pass


def install_comm_guard(config: CommGuardConfig, rank: int) -> Guard:
    """Call before the first collective. It listens to none where the mode is `off`, or without CUDA.

    Raises ConfigError for a policy that cannot be read or, where that is asked for, that another stack made.
    """
    if config.mode == "off":
        return _Off()
    policy = configured_policy(config)
    if not torch.cuda.is_available():
        return _Off()
    stack = present_stack()
    if config.mode == "observe":
        observer = Observer(CudaDriver(), stack, None if config.evidence is None else Path(config.evidence), rank)
        observer.install()
        return observer
    if (warning := check_stack(policy, stack, config)) and rank == 0:
        _log.warning(warning)
    guard = CommGuard(policy, CudaDriver(), ttl_seconds=config.ttl_seconds, recovery=config.recovery)
    guard.install()
    return guard


def configured_policy(config: CommGuardConfig) -> Policy:
    """The policy's file, with the threshold of the configuration where that has one."""
    policy = load_policy(DEFAULT_RULES if config.policy is None else Path(config.policy))
    if config.threshold_share is None and config.threshold_bytes is None:
        return policy
    threshold = Threshold(share=config.threshold_share, size_bytes=config.threshold_bytes)
    return policy.model_copy(update={"threshold": threshold})


def check_stack(policy: Policy, present: Stack, config: CommGuardConfig) -> str:
    """What is wrong with a policy made elsewhere, empty if nothing; ConfigError where that is refused."""
    different = [] if policy.stack is None else policy.stack.differences(present)
    if not different:
        return ""
    sentence = (
        f"the policy {config.policy} was made for {', '.join(different)}: make one here with `rlpipe commguard profile`"
    )
    if config.other_stack == "refuse":
        raise ConfigError(f"{sentence}, or set actor.comm_guard.other_stack to warn")
    return sentence
