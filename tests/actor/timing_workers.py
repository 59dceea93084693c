"""What the timing tests run inside spawned workers; imports Megatron."""

import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_workers
from train_support import VOCABULARY

from actor.collectives.exchange_timer import ExchangeTimer
from actor.collectives.interception import listen
from actor.kernel_warm_up import warm_up
from actor.rank_clock import RankClock
from actor.trainer import Trainer
from actor.worker import ActorWorker
from rlpipe.batching import PackLimits
from rlpipe.batching.shape_classes import shape_class_packs
from tests.small_config import small_config


def threads_of_a_process(rank: int, count: int, threads: int, cores: int) -> int:
    """What a process of the actor computes with on a machine of `cores`."""
    os.sched_getaffinity = lambda _: set(range(cores))
    ActorWorker(small_config(actor={"threads": threads}), rank, None, time.perf_counter())
    return torch.get_num_threads()


def planted_sleeps(rank: int, count: int, policy_path: Path, sleep_seconds: float) -> dict[str, Any]:
    """One step without and one for each planted sleep on rank 1; seconds of each part, by what was planted."""
    clock = RankClock()
    undo = listen(ExchangeTimer(clock))
    trainer = train_workers.trainer(policy_path, count, clock=clock)
    pack = train_workers.split(train_workers.whole_batch(), [range(4), range(4, 8)])[rank]
    found: dict[str, Any] = {}
    for planted in ("nothing", "forward", "backward", "optimizer"):
        undo_sleep = _plant(trainer, planted, sleep_seconds if rank == 1 else 0.0)
        clock.take()
        start = time.perf_counter()
        trainer.train([[pack]], train_workers.POLICY)
        whole = time.perf_counter() - start
        undo_sleep()
        found[planted] = (whole, clock.take()[0])
    clock.keep_spans = True
    begin = time.time()
    trainer.train([[pack]], train_workers.POLICY)
    found["spans"] = (begin, time.time(), clock.take()[1])
    undo()
    return found


class FirstExchanges:
    """Groups and operations, as they are begun."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []

    def note(self, group: str, operation: str) -> AbstractContextManager[None]:
        self.begun.append((group, operation))
        return nullcontext()


def warm_up_leaves_no_trace(rank: int, policy_path: Path, count: int) -> dict[str, Any]:
    """Weights, optimizer state, metrics and random numbers after one step, with and without a warm-up before it; and
    the exchanges that the warm-up left for the step to begin, as group and operation."""
    limits = PackLimits(budget_tokens=64)
    shapes = shape_class_packs(limits, VOCABULARY, longest_tokens=64)
    packs = [replace(pack, ref_logprobs=pack.rollout_logprobs) for pack in shapes]
    own = train_workers.split(train_workers.whole_batch(), [range(4), range(4, 8)])[rank]
    found: dict[str, Any] = {}
    for name in ("cold", "warm"):
        trainer = train_workers.trainer(policy_path, count)
        exchanges = FirstExchanges()
        undo = listen(ExchangeTimer(RankClock(), exchanges.note))
        if name == "warm":
            warm_up(trainer, packs, packs, train_workers.POLICY, longest_sequence_tokens=64)
            exchanges.begun.clear()
        metrics = trainer.train_step([own], train_workers.POLICY).metrics
        found[f"{name} begins"] = exchanges.begun
        undo()
        draws = (random.random(), float(np.random.random()), float(torch.rand(())))
        state = [tensor.numpy() for tensor in train_workers.masters_and_moments(trainer)]
        found[name] = (metrics, draws, train_workers.weights(trainer), state, trainer.counts)
    return found


def everything(rank: int, count: int, policies: dict[str, Path], sleep_seconds: float) -> dict[str, Any]:
    """Of one process."""
    return {
        "planted": planted_sleeps(rank, count, policies["dense"], sleep_seconds),
        "warm_up": {name: warm_up_leaves_no_trace(rank, path, count) for name, path in policies.items()},
    }


def _plant(trainer: Trainer, where: str, seconds: float) -> Any:
    chunk = trainer.policy[0]
    if where == "forward":
        return chunk.register_forward_pre_hook(lambda *_: time.sleep(seconds)).remove
    if where == "backward":
        parameter = next(chunk.parameters())
        return parameter.register_hook(lambda gradient: time.sleep(seconds)).remove
    if where == "optimizer":
        optimizer, step = trainer.optimizer, trainer.optimizer.step

        def slow_step(*arguments: Any) -> None:
            time.sleep(seconds)
            step(*arguments)

        optimizer.step = slow_step
        return lambda: vars(optimizer).pop("step")
    return lambda: None
