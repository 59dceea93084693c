"""Everything a run is made of, opened in order and closed in reverse, whatever happens."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actor.group import ActorGroup
from rewards.grading_pool import open_grading
from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.data import PromptSet
from rlpipe.data.stream import StreamState
from rlpipe.generation.inputs import Inputs, load_inputs
from rlpipe.generation.producer import Rollouts
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.run_directory import RunDirectory, open_run_directory
from rlpipe.monitoring.trackers import open_trackers
from rlpipe.supervised.warm_start import warm_start
from rlpipe.training.checkpoints import RunState, checkpoint_is_due, checkpoint_to_resume
from rlpipe.training.evaluation import Evaluation
from rlpipe.training.iteration import IterationLog, IterationRecord
from rlpipe.training.learner import Learner
from rlpipe.training.measurement import Measurement
from rlpipe.training.memory_sharing import MemorySharing
from rlpipe.training.weight_sync import WeightSync
from rlpipe.training.workers import StartClock, open_workers
from rollout.pool import RolloutPool


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
    measurement: Measurement
    start: RunState
    advised: bool = False

    def iterations(self) -> range:
        """Numbers of the iterations still to do."""
        return range(self.start.iteration + 1, self.config.run.iterations + 1)

    def evaluate(self, iteration: int, record: IterationRecord) -> None:
        """Evaluate on the sets that are due after `iteration`."""
        record.add(self.evaluation.run(iteration, self.rollouts))

    def checkpoint(self, iteration: int) -> None:
        """Save where it is due after `iteration`."""
        if checkpoint_is_due(self.config, iteration):
            position, pending = self.rollouts.position()
            state = RunState(iteration, position.epoch, position.position, pending)
            with self.memory_sharing.during_save():
                self.actor.save_checkpoint(self.directory.checkpoints, iteration, asdict(state))

    def close(self) -> None:
        """Finish what is still being written, and write the final policy where that is asked for."""
        self.actor.finish_checkpoint()
        if self.config.checkpoint.save_hf:
            with self.memory_sharing.during_save():
                self.actor.save_hf(self.directory.policy)

    def packing_metrics(self, packs: TrainingPacks) -> dict[str, float]:
        """How full the packs are; tells once when another budget would need fewer."""
        advice = self.learner.advice(packs)
        if advice.worthwhile and not self.advised:
            self.console.say(f"packing: {advice}")
            self.advised = True
        return {**packs.report.metrics, "pack/advised_saved_share": advice.saved_share}

    def data_metrics(self) -> dict[str, float]:
        return {
            "data/epoch": float(self.rollouts.prompts.state.epoch),
            "data/prompts_too_long": float(self.prompt_set.too_long),
            "data/rows_skipped": float(self.prompt_set.rows_skipped),
            "data/special_text_rows": float(self.prompt_set.special_text_rows),
        }


@contextmanager
def open_session(config: Config, resume: bool = False, overwrite: bool = False) -> Iterator[Session]:
    """Prepare files, start Ray, engines and actor, load or warm-start the policy, and synchronize weights.

    What can be wrong in the configuration, the data or the model folder is found before anything is started.
    """
    console = Console(config.run.iterations)
    clock = StartClock(console)
    with clock.task("inputs", "reading model folder and data"):
        inputs = load_inputs(config)
    config = inputs.config
    for made in inputs.made:
        console.say(f"made {made}")
    for note in inputs.notes:
        console.say(note)
    directory = open_run_directory(config, resume, overwrite)
    checkpoint = checkpoint_to_resume(directory, resume)
    config = _with_saved_reference(config, directory)
    with ExitStack() as stack:
        grading = stack.enter_context(open_grading(config.reward))
        logs = str(directory.logs.absolute())
        workers = stack.enter_context(open_workers(config, config.algorithm, logs, console, clock))
        pool, actor, memory_sharing = workers.pool, workers.actor, workers.memory_sharing
        state = _load_or_warm_start(inputs, actor, checkpoint, directory, console, clock)
        workers.wait_for_engines(console, clock)
        with clock.task("weights", "sending weights to the engines"):
            weights = WeightSync(config, actor, pool, memory_sharing)
            weights.push(state.iteration)
        memory_sharing.take_seconds()  # belong to no iteration
        memory_sharing.take_metrics()

        trackers = stack.enter_context(open_trackers(config, directory, state.iteration + 1 if checkpoint else 0))
        position = StreamState(state.epoch, state.position)
        rollouts = stack.enter_context(Rollouts(pool, grading, inputs, console, position, state.pending))
        learner = Learner(config, actor)
        console.say(learner.old_policy_choice)
        yield Session(
            config=config,
            directory=directory,
            console=console,
            log=IterationLog(trackers, console, clock.metrics()),
            prompt_set=inputs.training,
            pool=pool,
            actor=actor,
            rollouts=rollouts,
            learner=learner,
            evaluation=Evaluation(config, inputs.evaluation),
            weights=weights,
            memory_sharing=memory_sharing,
            measurement=Measurement(config, actor, directory, console, state.iteration + 1, pool),
            start=state,
        )


def _with_saved_reference(config: Config, directory: RunDirectory) -> Config:
    """A resumed run takes the reference that its warm start left, since the warm start is not done again."""
    if config.model.reference_path or not (directory.reference / "config.json").exists():
        return config
    model = config.model.model_copy(update={"reference_path": str(directory.reference)})
    return config.model_copy(update={"model": model})


def _load_or_warm_start(
    inputs: Inputs,
    actor: ActorGroup,
    checkpoint: Path | None,
    directory: RunDirectory,
    console: Console,
    clock: StartClock,
) -> RunState:
    settings = inputs.config.warm_start
    if checkpoint is not None:
        with clock.task("policy", f"loading {checkpoint}"):
            saved: dict[str, Any] = actor.load_checkpoint(checkpoint)
        return RunState(**saved)
    if settings is not None:
        with clock.task("policy", f"warm start, up to {settings.steps} supervised steps"):
            result = warm_start(inputs, settings, actor, console)
            if inputs.config.algorithm.kl.coefficient > 0:
                actor.save_hf(directory.reference)
        console.say(f"warm start: {result.steps} supervised steps, last loss {result.loss:.3f} nats a token")
    return RunState()
