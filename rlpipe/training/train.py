"""The training loop: one iteration after another, one phase after another."""

from pathlib import Path

import psutil

from rewards.reward_metrics import graded_table
from rlpipe.config.root import Config
from rlpipe.shared.collection import collection_paused
from rlpipe.training.actor_restarts import actor_attempts
from rlpipe.training.opening import Opening
from rlpipe.training.session import Session, open_run, open_session
from rlpipe.training.summaries import (
    cache_metrics,
    draft_metrics,
    fault_metrics,
    generation_metrics,
    rollout_metrics,
    start_metrics,
)


def train(config: Config, opening: Opening = Opening()) -> Path:
    """Run GRPO as configured. Returns the run's folder. Raises RlpipeError for what the user can fix."""
    with open_run(config, opening) as run:
        for attempt in actor_attempts(config.fault, run.console):
            with attempt, open_session(run) as session:
                _iterate(session)
    return run.directory.path


def _iterate(run: Session) -> None:
    if run.start.first_row == 0:
        with run.iteration(0) as step, step.phase("eval"):
            run.evaluate(0, step)

    for iteration in run.iterations():
        with run.iteration(iteration) as step:
            with step.phase("rollout"):
                batch = run.rollouts.take(iteration, run.weights.version)
            step.split("rollout", {"reward": batch.grading_seconds}, rest="rollout")
            samples = batch.samples
            with step.phase("sleep_wake"):
                run.memory_sharing.onload_actor()
            with step.phase("ref_logprob"):
                reference = run.learner.reference_logprobs(samples)
            with step.phase("old_logprob"):
                old = run.learner.old_logprobs(samples, run.weights.version)
            with collection_paused():
                with step.phase("advantage"):
                    result = run.learner.advantages(samples, reference, old, run.weights.version)
                with step.phase("pack"):
                    packs = run.learner.pack(result.samples, reference, old)
                run.commit(step)
                with step.phase("train"):
                    training = run.learner.begin_train(packs)
            with step.phase("train"):
                # Beside the actor, for samples by the million take the driver seconds.
                step.add(rollout_metrics(samples, run.weights.version))
                step.add(run.rollouts.grading_metrics(samples))
                step.add(run.packing_metrics(packs))
                step.sample_rows = graded_table(samples, rows=4)
                step.transcripts = run.rollouts.transcripts(result.samples)
                report = training.result()
            with step.phase("tracking"):
                step.add(result.counts.metrics)
                step.add(report.metrics)
                usage = run.pool.take_usage()
                step.add(generation_metrics(batch, usage))
                step.add(cache_metrics(usage, run.rollouts.take_routing()))
                step.add(draft_metrics(usage, run.config))
                if iteration == run.start.iteration + 1:
                    step.add(start_metrics(usage, psutil.Process().create_time()))
                step.add(run.data_metrics())
                step.responses = batch.record
            with step.phase("rollout"):
                run.rollouts.wait_for_running()
            with step.phase("weight_sync"):
                step.add(run.weights.push(iteration))
            step.split("weight_sync", run.memory_sharing.take_seconds(), rest="weight_sync")
            with step.phase("eval"):
                run.evaluate(iteration, step)
            with step.phase("checkpoint"):
                run.checkpoint(iteration, step)
            step.split("checkpoint", run.memory_sharing.take_seconds(), rest="checkpoint")
            with step.phase("tracking"):
                step.add(run.memory_sharing.take_metrics())
                step.add(fault_metrics(run.pool.take_fault_counts()))
                run.measurement.finish(step, packs)
    run.close()
