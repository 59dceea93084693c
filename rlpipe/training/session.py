"""Everything a run is made of, opened in order and closed in reverse, whatever happens."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from actor.group import ActorGroup
from rewards.grading_pool import GradingPool, open_grading
from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.data import PromptSet
from rlpipe.data.stream import StreamState
from rlpipe.generation.inputs import Inputs, load_inputs
from rlpipe.generation.producer import Rollouts
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_header import run_header
from rlpipe.monitoring.trackers import open_trackers
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.interrupts import CleanupStack
from rlpipe.supervised.warm_start import warm_start
from rlpipe.training.adapter_updates import check_adapter_updates, with_measured_choice, with_saved_choice
from rlpipe.training.checkpoints import (
    Checkpoints,
    RunState,
    checkpoint_is_due,
    load_newest,
)
from rlpipe.training.evaluation import Evaluation
from rlpipe.training.iteration import IterationLog, IterationRecord
from rlpipe.training.last_words import explained_end, last_words
from rlpipe.training.learner import Learner
from rlpipe.training.measurement import Measurement
from rlpipe.training.memory_choice import with_memory_choices
from rlpipe.training.memory_sharing import MemorySharing
from rlpipe.training.opening import Opening, discard_replaced, open_run_directory
from rlpipe.training.policies import PolicyFolders
from rlpipe.training.policy_checks import check_algorithm, check_policy
from rlpipe.training.trained_share import trained_notes
from rlpipe.training.weight_sync import WeightSync
from rlpipe.training.workers import Bundles, StartClock, open_cluster, open_workers
from rollout.pool import RolloutPool


@dataclass
class Run:
    """What outlives an actor: files, inputs, Ray with its reserved resources, graders. `clock`: of the next start.
    `restarts`: of the actor so far."""

    config: Config
    directory: RunDirectory
    console: Console
    inputs: Inputs
    grading: GradingPool
    bundles: Bundles
    clock: StartClock
    restarts: int = 0

    def expect_restart(self) -> None:
        """Another start begins."""
        self.clock = StartClock(self.console)
        self.restarts += 1


@dataclass
class Session:
    """The parts of a running job, as the training loop uses them."""

    config: Config
    directory: RunDirectory
    console: Console
    log: IterationLog
    prompt_set: PromptSet
    pool: RolloutPool
    actor: ActorGroup
    rollouts: Rollouts
    learner: Learner
    evaluation: Evaluation
    weights: WeightSync
    memory_sharing: MemorySharing
    policies: PolicyFolders
    measurement: Measurement
    start: RunState
    checkpoints: Checkpoints
    advised: bool = False

    def iterations(self) -> range:
        """Numbers of the iterations still to do."""
        return range(self.start.iteration + 1, self.config.run.iterations + 1)

    def iteration(self, number: int) -> AbstractContextManager[IterationRecord]:
        """The record of iteration `number`, whose state can be saved afterwards."""
        return self.checkpoints.iteration(self.log, number, self._state)

    def commit(self, record: IterationRecord) -> None:
        """The policy is about to change: from here on a signal lets the iteration end, so that it can be saved."""
        self.checkpoints.commit(record)

    def evaluate(self, iteration: int, record: IterationRecord) -> None:
        """Evaluate on the sets that are due after `iteration`."""
        record.add(self.evaluation.run(iteration, self.rollouts))

    def checkpoint(self, iteration: int, record: IterationRecord) -> None:
        """Save what is due after `iteration`: a checkpoint, the policy for others to load."""
        if checkpoint_is_due(self.config, iteration):
            self.checkpoints.save(self._state(iteration))
        self.policies.after_iteration(iteration, record.metrics)

    def _state(self, iteration: int) -> RunState:
        position, pending = self.rollouts.position()
        fingerprint, lengths = self.prompt_set.fingerprint, self.rollouts.lengths.state()
        return RunState(iteration, position.epoch, position.position, pending, fingerprint, lengths)

    def close(self) -> None:
        """Finish what is still being written, and write the final policy unless that is not wanted."""
        self.actor.finish_checkpoint()
        self.policies.after_training()

    def packing_metrics(self, packs: TrainingPacks) -> dict[str, float]:
        """How full the packs are; tells once when another budget would need fewer."""
        advice = self.learner.advice(packs)
        if advice.worthwhile and not self.advised:
            self.console.say(f"packing: {advice}")
            self.advised = True
        return {**packs.report.metrics, "pack/advised_saved_share": advice.saved_share}

    def data_metrics(self) -> dict[str, float]:
        return {"data/epoch": float(self.rollouts.prompts.state.epoch), **self.prompt_set.rows.metrics}


@contextmanager
def open_run(config: Config, opening: Opening = Opening()) -> Iterator[Run]:
    """Prepare files, start Ray and graders. What can be wrong in the configuration, the data or the model folder is
    found before anything is started."""
    console = Console(config.run.iterations)
    clock = StartClock(console)
    with clock.task("inputs", "reading model folder and data"):
        inputs = load_inputs(config)
        config, choices = with_memory_choices(inputs.config, bool(opening.resume))
        inputs = replace(inputs, config=config)
        config = with_saved_choice(config, bool(opening.resume))
        check_policy(config)
        check_algorithm(config)
        check_adapter_updates(config)
    for made in inputs.made:
        console.say(f"made {made}")
    for note in (*inputs.notes, *choices, *trained_notes(config)):
        console.say(note)
    opened = open_run_directory(config, opening, inputs.training.fingerprint, console.say)
    with opened as directory, explained_end(directory), CleanupStack() as stack:
        console.header(run_header(config, directory))
        bundles = stack.enter_context(open_cluster(config, clock, lambda: last_words(directory)))
        grading = stack.enter_context(open_grading(config.reward))
        yield Run(config, directory, console, inputs, grading, bundles, clock)


@contextmanager
def open_session(run: Run) -> Iterator[Session]:
    """Start engines and actor, load the newest checkpoint or warm-start the policy, and synchronize weights.

    Where the run ends early, what is whole is saved. Another session can follow: then all starts anew but `run`, so
    that no engine keeps anything of an actor that was lost.
    """
    directory, console, clock = run.directory, run.console, run.clock
    checkpoint = latest_checkpoint(directory.checkpoints)
    config = _with_saved_reference(run.config, directory, checkpoint)
    with CleanupStack() as stack:
        stack.callback(run.expect_restart)
        logs = str(directory.logs.absolute())
        workers = stack.enter_context(open_workers(config, config.algorithm, run.bundles, logs, console, clock))
        pool, actor, memory_sharing = workers.pool, workers.actor, workers.memory_sharing
        if checkpoint is None:
            state = _warm_start(run.inputs, actor, directory, console, clock)
        else:
            state, checkpoint = load_newest(actor, directory, console.say, partial(clock.task, "policy"))
        checkpoints = Checkpoints(config, directory, actor, memory_sharing.during_save, console, state, checkpoint)
        workers.wait_for_engines(console, clock)
        with clock.task("weights", "sending weights to the engines"):
            weights = WeightSync(config, actor, pool, memory_sharing)
            run.config = with_measured_choice(run.config, weights, pool, state.iteration, console.say)
            weights.adapters_alone = run.config.weight_sync.adapters == "alone"
            weights.push(state.iteration)
        memory_sharing.take_seconds()  # belong to no iteration
        memory_sharing.take_metrics()

        trackers = stack.enter_context(open_trackers(config, directory, state.first_row))
        for note in trackers.notes:
            console.say(note)
        discard_replaced(directory)
        position = StreamState(state.epoch, state.position)
        rollouts = stack.enter_context(
            Rollouts(pool, run.grading, run.inputs, console, position, state.pending, weights.catch_up, state.lengths)
        )
        learner = Learner(config, actor)
        console.say(learner.old_policy_choice)
        session = Session(
            config=config,
            directory=directory,
            console=console,
            log=IterationLog(
                trackers,
                console,
                config.needed_gpus,
                clock.metrics() | {"fault/actor_restarts_count": float(run.restarts)},
            ),
            prompt_set=run.inputs.training,
            pool=pool,
            actor=actor,
            rollouts=rollouts,
            learner=learner,
            evaluation=Evaluation(config, run.inputs.evaluation),
            weights=weights,
            memory_sharing=memory_sharing,
            policies=PolicyFolders(config, directory, actor, memory_sharing.during_save),
            measurement=Measurement(config, actor, directory, console, state.iteration + 1, pool),
            start=state,
            checkpoints=checkpoints,
        )
        with checkpoints.saved_before_early_end(rollouts.interrupt):
            yield session


def _with_saved_reference(config: Config, directory: RunDirectory, checkpoint: Path | None) -> Config:
    """A resumed run takes the reference that its warm start left, since the warm start is not done again."""
    saved = checkpoint is not None and (directory.reference / "config.json").exists()
    if config.model.reference_path or not saved:
        return config
    model = config.model.model_copy(update={"reference_path": str(directory.reference)})
    return config.model_copy(update={"model": model})


def _warm_start(
    inputs: Inputs, actor: ActorGroup, directory: RunDirectory, console: Console, clock: StartClock
) -> RunState:
    settings = inputs.config.warm_start
    if settings is not None:
        with clock.task("policy", f"warm start, up to {settings.steps} supervised steps"):
            result = warm_start(inputs, settings, actor, console)
            # Adapters have theirs in every checkpoint.
            if inputs.config.algorithm.kl.coefficient > 0 and inputs.config.actor.lora is None:
                actor.save_hf(directory.reference)
        console.say(f"warm start: {result.steps} supervised steps, last loss {result.loss:.3f} nats a token")
    return RunState()
