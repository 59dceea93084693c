"""What `kubectl apply` is given for a run: its configuration as a ConfigMap, and the RayJob of KubeRay that runs it,
which is scripts/kubernetes/rayjob.yaml with a cluster's values filled in.
"""

import copy
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from rlpipe.commands.launch.paths_in_pods import check_paths
from rlpipe.commands.launch.yaml_merge import merge_named
from rlpipe.config.cluster import ClusterConfig, KubernetesConfig
from rlpipe.config.root import Config
from rlpipe.config.save import resolved_yaml
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import REQUIREMENTS, SCRIPTS
from rlpipe.shared.secret_text import hide_in_tree

TEMPLATE = SCRIPTS / "kubernetes" / "rayjob.yaml"
_GPU = "nvidia.com/gpu"
_LONGEST_NAME = 47  # KubeRay adds suffixes to it, and a label has at most 63 characters
_SHARE_OF_NODE = 0.9
_ENDING_SECONDS = 60
"""Between the saved checkpoint and the end of a driver that `ray job stop` ends."""
_FILE = "config.yaml"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def manifest(config: Config, cluster: ClusterConfig, environment: Mapping[str, str]) -> str:
    """The manifests as YAML. The head is one of the nodes; the job goes on from its newest checkpoint when restarted.

    Raises ConfigError for a path that pods do not see, and for a secret in the configuration.
    """
    settings = cluster.kubernetes
    if settings is None:
        raise ConfigError("this cluster file has no section kubernetes: add one with an image")
    check_paths(config, settings)
    name = job_name(config.run.name)
    documents = [_configuration(config, name, settings), _job(config, cluster, settings, name, environment)]
    return str(yaml.dump_all(documents, Dumper=_Readable, sort_keys=False))


def job_name(run: str) -> str:
    """A run's name as KubeRay allows it: lower-case letters, digits and dashes, of which the first is a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:_LONGEST_NAME].strip("-")


class _Readable(yaml.SafeDumper):
    """Without aliases; text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def _configuration(config: Config, name: str, settings: KubernetesConfig) -> dict[str, Any]:
    plain = config.model_dump(mode="json")
    if hide_in_tree(plain) != plain:
        raise ConfigError(
            "the configuration holds a secret, which a ConfigMap shows: name it by a variable and put that into the "
            "Kubernetes secret of kubernetes.secret"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": settings.namespace, "labels": {"app.kubernetes.io/name": "rlpipe"}},
        "data": {_FILE: resolved_yaml(config)},
    }


def _job(
    config: Config, cluster: ClusterConfig, settings: KubernetesConfig, name: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    # The template's anchors make one object of equal parts.
    job: dict[str, Any] = yaml.load(TEMPLATE.read_text(), Loader=yaml.SafeLoader)
    job = _without_sharing(job)
    job["metadata"] |= {"name": name, "namespace": settings.namespace}
    if settings.queue:
        job["metadata"]["labels"][_QUEUE_LABEL] = settings.queue
    spec = job["spec"]
    driver = ("rlpipe", "train", f"/etc/rlpipe/{_FILE}", "ray.address=auto", f"ray.nodes={cluster.nodes}", "--requeued")
    spec["entrypoint"] = shlex.join(driver)
    ray = spec["rayClusterSpec"]
    ray["rayVersion"] = _ray_version()
    if settings.dashboard_token:
        ray["authOptions"] = {"mode": "token"}
    _place(spec["submitterPodTemplate"], settings)
    grace = math.ceil(config.fault.grace_seconds) + _ENDING_SECONDS
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(grace), **environment}
    head, worker = ray["headGroupSpec"], ray["workerGroupSpecs"][0]
    for group in (head, worker):
        _fill(group["template"], cluster, settings, name, variables)
        group["template"]["spec"]["terminationGracePeriodSeconds"] = grace
        group["template"] = merge_named(group["template"], settings.pod)
    others = cluster.nodes - 1
    worker |= {"replicas": others, "minReplicas": others, "maxReplicas": others}
    if not others:
        ray["workerGroupSpecs"] = []
    return merge_named(job, settings.job)


def _place(pod: dict[str, Any], settings: KubernetesConfig) -> None:
    """What every pod of the job has: image, user, account, and leave to run."""
    spec = pod["spec"]
    spec["securityContext"] |= {"runAsUser": settings.user, "runAsGroup": settings.user, "fsGroup": settings.user}
    spec["containers"][0]["image"] = settings.image
    chosen = {
        "imagePullSecrets": [{"name": secret} for secret in settings.image_pull_secrets],
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
    }
    spec |= {key: value for key, value in chosen.items() if value}


def _fill(
    pod: dict[str, Any], cluster: ClusterConfig, settings: KubernetesConfig, name: str, variables: Mapping[str, str]
) -> None:
    """A Ray node's pod."""
    _place(pod, settings)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    resources = _resources(cluster, settings)
    container["resources"] = {"limits": resources, "requests": dict(resources)}
    container["env"] = [{"name": variable, "value": value} for variable, value in variables.items()]
    if settings.secret:
        container["envFrom"] = [{"secretRef": {"name": settings.secret}}]
    if settings.devices:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    shared, configuration = spec["volumes"]
    shared["emptyDir"]["sizeLimit"] = f"{settings.shared_memory_gigabytes:g}G"
    configuration["configMap"]["name"] = name
    for claim in dict.fromkeys(volume.claim for volume in settings.volumes):
        spec["volumes"].append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    for volume in settings.volumes:
        mount: dict[str, Any] = {"name": volume.claim, "mountPath": volume.path}
        if volume.folder:
            mount["subPath"] = volume.folder
        if volume.read_only:
            mount["readOnly"] = True
        container["volumeMounts"].append(mount)
    if settings.annotations:
        pod["metadata"]["annotations"] = dict(settings.annotations)
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        spec["tolerations"] = copy.deepcopy(settings.tolerations)


def _resources(cluster: ClusterConfig, settings: KubernetesConfig) -> dict[str, str]:
    """Limits and requests alike, so that a pod is the last that its node ends. Ray counts CPUs and GPUs by them."""
    node = cluster.node
    cpus = settings.cpus or max(1, int(node.cpus * _SHARE_OF_NODE))
    memory = settings.memory_gigabytes or math.floor(node.memory_gigabytes * _SHARE_OF_NODE * 10) / 10
    if settings.shared_memory_gigabytes >= memory:
        raise ConfigError(
            f"kubernetes.shared_memory_gigabytes is {settings.shared_memory_gigabytes:g}, which is part of the "
            f"{memory:g} that a pod has in all: lower it"
        )
    resources = {"cpu": str(cpus), "memory": f"{memory:g}G"}
    if node.gpus:
        resources[_GPU] = str(node.gpus)
    return resources | {name: str(count) for name, count in settings.devices.items()}


def _without_sharing(tree: Any) -> Any:
    """A copy in which no part stands twice; copy.deepcopy would keep such parts one object."""
    if isinstance(tree, dict):
        return {key: _without_sharing(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_sharing(value) for value in tree]
    return tree


def _ray_version() -> str:
    """The one that docker/Dockerfile.gpu installs."""
    for line in (REQUIREMENTS / "gpu.txt").read_text().splitlines():
        if line.startswith("ray=="):
            return line.removeprefix("ray==").strip()
    raise ConfigError("requirements/gpu.txt has no line `ray==VERSION`, which the manifest's rayVersion is taken from")
