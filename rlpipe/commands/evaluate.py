"""Evaluating a policy without training it: engines and graders alone."""

from concurrent.futures import ThreadPoolExecutor

from rewards.grading_pool import open_grading
from rlpipe.config.root import Config
from rlpipe.generation.inputs import Inputs, load_inputs
from rlpipe.generation.producer import Rollouts
from rlpipe.model.hub import model_folder
from rlpipe.model.weight_checks import check_finite
from rlpipe.monitoring.console import Console
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.interrupts import CleanupStack
from rlpipe.training.evaluation import Evaluation
from rlpipe.training.placement import engine_placement
from rlpipe.training.ray_cluster import ray_cluster
from rollout.pool import RolloutPool


def read_evaluation_inputs(config: Config) -> Inputs:
    """What `load_inputs` says. Raises ConfigError where there is no evaluation set."""
    if not config.eval.datasets:
        raise ConfigError("eval.datasets is empty: name at least one data set to evaluate on")
    return load_inputs(config)


def evaluate(config: Config) -> dict[str, float]:
    """Metrics of the evaluation sets for the policy at `model.path`. Raises ModelError where a weight of it is not
    finite, be it of a token that no answer holds."""
    inputs = read_evaluation_inputs(config)
    config = inputs.config
    console = Console(config.run.iterations, to_stderr=True)
    for note in inputs.notes:
        console.say(note)
    with CleanupStack() as stack:
        reader = stack.enter_context(ThreadPoolExecutor(1))  # beside the engines, which read the same files
        weights = reader.submit(check_finite, model_folder(config.model.path))
        stack.enter_context(ray_cluster(config))
        grading = stack.enter_context(open_grading(config.reward))
        placement = stack.enter_context(engine_placement(config))
        pool = RolloutPool.start(config, config.model.path, placement, say=console.say, with_text=True)
        stack.callback(pool.stop)
        with console.task("starting the engines"):
            engines = pool.wait_until_ready()
            weights.result()
        for note in dict.fromkeys(note for engine in engines for note in engine.notes):
            console.say(note)
        with console.task("evaluating"):
            rollouts = stack.enter_context(Rollouts(pool, grading, inputs, console))
            return Evaluation(config, inputs.evaluation).run(0, rollouts)
