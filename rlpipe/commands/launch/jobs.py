"""What becomes of a launched run: how its job stands, ending it, letting it begin anew where it is."""

from collections.abc import Sequence
from pathlib import Path

from rlpipe.commands.clusters import load_cluster, settings_of
from rlpipe.commands.launch.kubernetes_jobs import KubernetesJobs
from rlpipe.commands.launch.slurm_jobs import SlurmJobs
from rlpipe.commands.run_status import run_status
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import ConfigError


def job_status(config_path: Path, overrides: Sequence[str], cluster_name: str) -> str:
    """A few lines about the jobs of the run, and about its folder where it can be seen from here."""
    config, jobs = _jobs(config_path, overrides, cluster_name)
    lines = jobs.describe()
    folder = Path(config.run.directory) / config.run.name
    if RunDirectory(folder).config.is_file():
        lines.append(run_status(folder))
    return "\n".join(lines)


def cancel_job(config_path: Path, overrides: Sequence[str], cluster_name: str, now: bool) -> str:
    """End the jobs of the run, after a checkpoint unless `now`. Returns what was done."""
    _, jobs = _jobs(config_path, overrides, cluster_name)
    return "\n".join(jobs.cancel(now))


def requeue_job(config_path: Path, overrides: Sequence[str], cluster_name: str) -> str:
    """Save a checkpoint and give the nodes back; the job waits in the queue again. Returns what was done."""
    _, jobs = _jobs(config_path, overrides, cluster_name)
    if not isinstance(jobs, SlurmJobs):
        raise ConfigError(f"only Slurm has a queue to go back to, and {cluster_name!r} is another kind of cluster")
    return "\n".join(jobs.requeue())


def _jobs(config_path: Path, overrides: Sequence[str], cluster_name: str) -> tuple[Config, SlurmJobs | KubernetesJobs]:
    cluster = load_cluster(cluster_name)
    config = load_config(config_path, [*settings_of(cluster), *overrides])
    if cluster.kind == "slurm":
        return config, SlurmJobs(config.run.name)
    if cluster.kubernetes is not None:
        return config, KubernetesJobs(config.run.name, cluster.kubernetes.namespace)
    raise ConfigError(
        f"runs on {cluster_name!r} ({cluster.kind}) have no scheduler: look at them with `rlpipe status "
        f"{Path(config.run.directory) / config.run.name}`, end them with Ctrl-C or SIGTERM"
    )
