"""`rlpipe warm-up`: fills the caches of all compilers as the start of a run would, and does no more."""

import tempfile

from rlpipe.config.root import Config
from rlpipe.generation.engine_checks import check_engines
from rlpipe.jit_monitor import worker_caches
from rlpipe.jit_monitor.compile_table import compile_table
from rlpipe.monitoring.console import Console
from rlpipe.prepare import prepare
from rlpipe.shared.remote import cluster_accelerator
from rlpipe.training.memory_choice import with_memory_choices
from rlpipe.training.policy_checks import check_algorithm, check_policy
from rlpipe.training.workers import StartClock, open_cluster, open_workers


def warm_up(config: Config) -> str:
    """Start engines and actor, let both meet every class of batch and pack, and end them.

    Reads the model's folder and no data; writes nothing but the caches, and what `prepare` makes.

    Returns a table of what compiled.
    """
    config = config.model_copy(update={"jit": config.jit.model_copy(update={"warm_up": "on"})})
    console = Console(config.run.iterations, to_stderr=True)
    clock = StartClock(console)
    prepare(config)
    check_engines(config)
    check_policy(config)
    check_algorithm(config)
    config, choices = with_memory_choices(config)
    for note in choices:
        console.say(note)
    with (
        tempfile.TemporaryDirectory(prefix="rlpipe-warm-up-") as logs,
        open_cluster(config, clock) as bundles,
        open_workers(config, config.algorithm, bundles, logs, console, clock) as workers,
    ):
        workers.wait_for_engines(console, clock)
        clock.metrics()
        reports = [usage.jit for usage in workers.actor.take_usage(0)]
        reports += [record.jit for record in workers.pool.take_records(0)]
        caches = worker_caches(config.jit.cache_directory, cluster_accelerator())
    table = compile_table((report.worker, event) for report in reports for event in report.events)
    return "\n".join([*table, *(f"{name}={value}" for name, value in sorted(caches.items()) if "/" in value)])
