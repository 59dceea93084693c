"""The RayJob of KubeRay that runs a job: scripts/kubernetes/rayjob.yaml with a cluster's values filled in."""

import copy
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rlpipe.config.cluster import ClusterConfig, KubernetesConfig
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import REQUIREMENTS, SCRIPTS

TEMPLATE = SCRIPTS / "kubernetes" / "rayjob.yaml"
_GPU = "nvidia.com/gpu"
_LONGEST_NAME = 47  # KubeRay adds suffixes to it, and a label has at most 63 characters


def manifest(config: Config, cluster: ClusterConfig, environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The manifest as YAML. The head is one of the nodes; the job goes on from its newest checkpoint when restarted."""
    settings = cluster.kubernetes
    if settings is None:
        raise ConfigError("this cluster file has no section kubernetes: add one with an image")
    job: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
    job["metadata"] = {**job["metadata"], "name": _name(config.run.name), "namespace": settings.namespace}
    spec = job["spec"]
    driver = ("rlpipe", "train", *arguments, "ray.address=auto", f"ray.nodes={cluster.nodes}", "--requeued")
    spec["entrypoint"] = shlex.join(driver)
    ray = spec["rayClusterSpec"]
    ray["rayVersion"] = _ray_version()
    head, worker = ray["headGroupSpec"], ray["workerGroupSpecs"][0]
    for group in (head, worker):
        # The template's anchors make one object of equal parts.
        group["template"] = copy.deepcopy(group["template"])
        _fill_pod(group["template"], cluster, settings, environment)
    others = cluster.nodes - 1
    worker |= {"replicas": others, "minReplicas": others, "maxReplicas": others}
    if not others:
        ray["workerGroupSpecs"] = []
    return yaml.dump(job, Dumper=_WithoutAliases, sort_keys=False)


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _fill_pod(
    pod: dict[str, Any], cluster: ClusterConfig, settings: KubernetesConfig, environment: Mapping[str, str]
) -> None:
    node, spec = cluster.node, pod["spec"]
    container = spec["containers"][0]
    container["image"] = settings.image
    resources = {"cpu": str(node.cpus), "memory": f"{node.memory_gigabytes:g}G"}
    if node.gpus:
        resources[_GPU] = str(node.gpus)
    container["resources"] = {"limits": resources, "requests": dict(resources)}
    container["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    if settings.secret:
        container["envFrom"] = [{"secretRef": {"name": settings.secret}}]
    shared = spec["volumes"][0]
    shared["emptyDir"]["sizeLimit"] = f"{settings.shared_memory_gigabytes:g}G"
    for volume in settings.volumes:
        spec["volumes"].append({"name": volume.claim, "persistentVolumeClaim": {"claimName": volume.claim}})
        container["volumeMounts"].append({"name": volume.claim, "mountPath": volume.path})
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)


def _name(run: str) -> str:
    """A run's name as Kubernetes allows it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower())[:_LONGEST_NAME].strip("-")


def _ray_version() -> str:
    """The one that docker/Dockerfile.gpu installs."""
    for line in (REQUIREMENTS / "gpu.txt").read_text().splitlines():
        if line.startswith("ray=="):
            return line.removeprefix("ray==").strip()
    raise ConfigError("requirements/gpu.txt has no line `ray==VERSION`, which the manifest's rayVersion is taken from")
