"""The supervised loop: the same actor, phases, checkpoints and resume as GRPO, without engines."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from actor.group import ActorGroup
from rlpipe.batching.pack_plan import flops_cost
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig
from rlpipe.data import PromptStream
from rlpipe.data.prompts import load_tokenizer
from rlpipe.data.stream import StreamState
from rlpipe.generation.inputs import shared_rows, with_pinned_models
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.run_header import run_header
from rlpipe.monitoring.trackers import open_trackers
from rlpipe.prepare import kept_though_different, prepare
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.interrupts import CleanupStack
from rlpipe.supervised.examples import Examples, load_examples
from rlpipe.supervised.held_out_loss import HeldOutLoss
from rlpipe.supervised.supervised_packs import supervised_packs
from rlpipe.training.actor_restarts import actor_attempts
from rlpipe.training.checkpoints import (
    Checkpoints,
    RunState,
    checkpoint_is_due,
    load_newest,
)
from rlpipe.training.iteration import IterationLog
from rlpipe.training.last_words import explained_end, last_words
from rlpipe.training.measurement import Measurement
from rlpipe.training.memory_choice import with_memory_choices
from rlpipe.training.opening import Opening, discard_replaced, open_run_directory
from rlpipe.training.placement import Placement, actor_placement
from rlpipe.training.policies import PolicyFolders
from rlpipe.training.policy_checks import check_policy
from rlpipe.training.ray_cluster import ray_cluster
from rlpipe.training.trained_share import trained_notes
from rlpipe.training.warm_up import warm_up_actor

_ALGORITHM = AlgorithmConfig(loss="sft")


@dataclass(frozen=True)
class SupervisedInputs:
    """What is read before anything starts. `config`: with what was chosen by memory, as `choices` say."""

    config: Config
    settings: SupervisedConfig
    examples: Examples
    held_out: Mapping[str, Examples]
    choices: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        told = [*self.examples.rows.notes("the training data")]
        for name, examples in self.held_out.items():
            told += examples.rows.notes(f"evaluation set {name}")
        return (*told, *self.choices)

    @property
    def summary(self) -> str:
        """What a dry run tells."""
        return (
            f"configuration, model folder and data are fine: {self.config.run.iterations} iterations of "
            f"{self.settings.sequences_per_step} of {len(self.examples.sequences)} sequences"
            + "".join(f"\n{note}" for note in self.notes)
        )


@dataclass(frozen=True)
class SupervisedRun:
    """What outlives an actor: files, examples, Ray with its reserved resources."""

    config: Config
    settings: SupervisedConfig
    directory: RunDirectory
    console: Console
    examples: Examples
    held_out: Mapping[str, Examples]
    bundles: Placement


@dataclass
class SupervisedSession:
    """The parts of a supervised run."""

    config: Config
    settings: SupervisedConfig
    directory: RunDirectory
    log: IterationLog
    actor: ActorGroup
    examples: Examples
    held_out: HeldOutLoss
    policies: PolicyFolders
    stream: PromptStream[TrainingSequence]
    measurement: Measurement
    start: RunState
    checkpoints: Checkpoints

    def checkpoint(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Save where it is due after `iteration`, whose `metrics` these are."""
        if checkpoint_is_due(self.config, iteration):
            self.checkpoints.save(self.state(iteration))
        self.policies.after_iteration(iteration, metrics)

    def state(self, iteration: int) -> RunState:
        """What a checkpoint after `iteration` keeps of the driver."""
        at = self.stream.state
        return RunState(iteration, at.epoch, at.position, data=self.examples.fingerprint)

    def close(self) -> None:
        """Finish what is still being written, then write the policy in Hugging Face layout."""
        self.actor.finish_checkpoint()
        self.policies.after_training()

    def data_metrics(self) -> dict[str, float]:
        return {"data/epoch": float(self.stream.state.epoch), **self.examples.rows.metrics}


def sft(config: Config, opening: Opening = Opening()) -> Path:
    """Train on supervised sequences; the policy is written as `checkpoint.save_hf` says. Returns the run's folder."""
    with _open_run(config, opening) as run:
        for attempt in actor_attempts(config.fault, run.console):
            with attempt, _open_session(run) as session:
                _iterate(session)
    return run.directory.path


def _iterate(run: SupervisedSession) -> None:
    config = run.config
    cost = flops_cost(config.model.path)
    if run.start.first_row == 0 and run.held_out.is_due(0):
        with run.checkpoints.iteration(run.log, 0, run.state) as step, step.phase("eval"):
            step.add(run.held_out.run(0, run.actor))
    for iteration in range(run.start.iteration + 1, config.run.iterations + 1):
        with run.checkpoints.iteration(run.log, iteration, run.state) as step:
            with step.phase("data"):
                sequences = run.stream.take(run.settings.sequences_per_step)
            with step.phase("pack"):
                packs = supervised_packs(
                    sequences,
                    config.actor,
                    data_parallel=run.actor.layout.data_parallel,
                    cost=cost,
                    wrapped=run.settings.packing == "wrapped",
                )
            run.checkpoints.commit(step)
            with step.phase("train"):
                report = run.actor.train(packs.ranks, _ALGORITHM)
            with step.phase("tracking"):
                step.add(packs.report.metrics)
                step.add(report.metrics)
                step.add(run.data_metrics())
            with step.phase("eval"):
                step.add(run.held_out.run(iteration, run.actor))
            with step.phase("checkpoint"):
                run.checkpoint(iteration, step.metrics)
            with step.phase("tracking"):
                run.measurement.finish(step, packs)
    run.close()


def read_supervised_inputs(config: Config, resumed: bool) -> SupervisedInputs:
    """Read and check everything. Raises RlpipeError for whatever is wrong with it."""
    settings = config.sft
    if settings is None:
        raise ConfigError("this configuration has no `sft` section; add one for `rlpipe sft`")
    prepare(config)
    config, choices = with_memory_choices(with_pinned_models(config), resumed)
    check_policy(config)
    tokenizer = load_tokenizer(config.model.path)
    examples = load_examples(config, settings, tokenizer)
    held_out = {one.name: load_examples(config, settings, tokenizer, [one]) for one in config.eval.datasets}
    shared = [
        note
        for name, held in held_out.items()
        for note in shared_rows(name, held.digests, examples.digests, "sequences", config.eval.allow_training_rows)
    ]
    notes = (*shared, *kept_though_different(config), *choices, *trained_notes(config))
    return SupervisedInputs(config, settings, examples, held_out, notes)


@contextmanager
def _open_run(config: Config, opening: Opening) -> Iterator[SupervisedRun]:
    console = Console(config.run.iterations)
    with console.task("reading model folder and data"):
        inputs = read_supervised_inputs(config, bool(opening.resume))
    config, examples = inputs.config, inputs.examples
    for note in inputs.notes:
        console.say(note)
    opened = open_run_directory(config, opening, examples.fingerprint, console.say)
    with opened as directory, explained_end(directory), CleanupStack() as stack:
        console.header(run_header(config, directory))
        with console.task("starting Ray"):
            stack.enter_context(ray_cluster(config, lambda: last_words(directory)))
            bundles = stack.enter_context(actor_placement(config))
        yield SupervisedRun(config, inputs.settings, directory, console, examples, inputs.held_out, bundles)


@contextmanager
def _open_session(run: SupervisedRun) -> Iterator[SupervisedSession]:
    config, directory, console, examples = run.config, run.directory, run.console, run.examples
    checkpoint = latest_checkpoint(directory.checkpoints)
    with CleanupStack() as stack:
        with console.task("starting the actor"):
            actor = ActorGroup.start(config, run.bundles, str(directory.logs.absolute()))
        stack.callback(actor.stop)
        for note in actor.notes:
            console.say(note)
        with console.task("warming up kernels"):
            warm_up_actor(config, actor, _ALGORITHM)
        state = RunState()
        if checkpoint is not None:
            state, checkpoint = load_newest(actor, directory, console.say, console.task)
        trackers = stack.enter_context(open_trackers(config, directory, state.first_row))
        for note in trackers.notes:
            console.say(note)
        discard_replaced(directory)
        checkpoints = Checkpoints(config, directory, actor, nullcontext, console, state, checkpoint)
        session = SupervisedSession(
            config=config,
            settings=run.settings,
            directory=directory,
            log=IterationLog(trackers, console, config.needed_gpus),
            actor=actor,
            examples=examples,
            held_out=HeldOutLoss(config, run.settings, run.held_out),
            policies=PolicyFolders(config, directory, actor),
            stream=PromptStream(
                examples.sequences, config.seed, config.data.shuffle, StreamState(state.epoch, state.position)
            ),
            measurement=Measurement(config, actor, directory, console, state.iteration + 1),
            start=state,
            checkpoints=checkpoints,
        )
        with checkpoints.saved_before_early_end():
            yield session
