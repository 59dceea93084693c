"""What `kubectl apply` would get, against the schemas that Kubernetes publishes; and asking for it with kubectl."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.commands.launch import launch
from rlpipe.commands.launch.kubernetes import job_name
from rlpipe.commands.launch.yaml_merge import merge_named
from rlpipe.config.load import load_config
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import ROOT as PROJECT

SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
DEMO = PROJECT / "configs/demo/arithmetic.yaml"
SHARED = ["run.directory=/shared/runs", "prepare.directory=/shared/task", "model.path=/shared/policy", "run.name=A_1"]
VERSIONS = ("1.30", kubernetes_validate.latest_version())
EVERYTHING = """
kind: kubernetes
nodes: 3
node: {gpus: 8, gpu_memory_gigabytes: 80, cpus: 96, memory_gigabytes: 1000}
environment: {NCCL_DEBUG: WARN}
kubernetes:
  image: registry.example/rlpipe:gpu
  namespace: training
  secret: keys
  image_pull_secrets: [registry]
  service_account: trainer
  volumes:
    - {claim: shared, path: /shared}
    - {claim: shared, path: /models, folder: hub/models, read_only: true}
  node_selector: {pool: gpu}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  memory_gigabytes: 800
  shared_memory_gigabytes: 200
  devices: {rdma/hca_shared: 1}
  annotations: {k8s.v1.cni.cncf.io/networks: ib0}
  priority_class: high
  queue: team
  user: 1234
  pod:
    metadata: {labels: {team: rl}}
    spec:
      hostIPC: false
      schedulerName: volcano
      containers:
        - name: rlpipe
          env: [{name: EXTRA, value: "1"}, {name: NCCL_DEBUG, value: INFO}]
      volumes: [{name: scratch, hostPath: {path: /scratch}}]
  job: {spec: {ttlSecondsAfterFinished: 60, activeDeadlineSeconds: 86400}}
"""


@pytest.fixture
def everything(tmp_path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the RayJob of a cluster file with every key."""
    return _documents(tmp_path, EVERYTHING)


def _documents(folder: Path, cluster: str, *settings: str) -> tuple[dict[str, Any], dict[str, Any]]:
    file = folder / "cluster.yaml"
    file.write_text(cluster)
    configuration, job = yaml.safe_load_all(launch(DEMO, [*SHARED, *settings], str(file)).text)
    return configuration, job


def _ray_pods(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ray = job["spec"]["rayClusterSpec"]
    yield from (group["template"] for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]))


def _check(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def _as_pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **template}


def test_everything_that_a_cluster_can_say_fits_the_published_schemas(everything):
    configuration, job = everything
    _check(configuration)
    for template in (job["spec"]["submitterPodTemplate"], *_ray_pods(job)):
        _check(_as_pod(template))
    del job["spec"]["activeDeadlineSeconds"]  # of the raw part, which the schema of our own does not know
    jsonschema.validate(job, SCHEMA)


def test_the_schemas_refuse_a_field_that_does_not_exist(tmp_path):
    raw = EVERYTHING.replace("schedulerName: volcano", "scheduleName: volcano")
    _, job = _documents(tmp_path, raw)
    with pytest.raises(kubernetes_validate.ValidationError, match="scheduleName"):
        _check(_as_pod(next(_ray_pods(job))))


def test_the_operators_own_definition_takes_the_job(everything):
    """With the file helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of KubeRay."""
    path = os.environ.get("RLPIPE_RAYJOB_CRD")
    if not path:
        pytest.skip("RLPIPE_RAYJOB_CRD does not name KubeRay's ray.io_rayjobs.yaml, which no package holds")
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    schema = next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1")
    jsonschema.validate(everything[1], _closed(schema))


def _closed(schema: Any) -> Any:
    """As the API server validates strictly: no field beyond those named, integers or text where it says so."""
    if isinstance(schema, list):
        return [_closed(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    # The server itself knows what metadata may hold.
    if named and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["additionalProperties"] = False
    return closed


def test_pods_get_what_the_cluster_says(everything):
    _, job = everything
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    assert [group["replicas"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]] == [2]
    for template in _ray_pods(job):
        spec, container = template["spec"], template["spec"]["containers"][0]
        assert template["metadata"]["labels"] == {"app.kubernetes.io/name": "rlpipe", "team": "rl"}
        assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "ib0"}
        assert spec["tolerations"][0]["key"] == "nvidia.com/gpu" and spec["nodeSelector"] == {"pool": "gpu"}
        assert spec["schedulerName"] == "volcano" and spec["volumes"][-1]["name"] == "scratch"
        asked = {"cpu": "86", "memory": "800G", "nvidia.com/gpu": "8", "rdma/hca_shared": "1"}
        assert container["resources"] == {"limits": asked, "requests": asked}
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        assert variables == {"RAY_JOB_STOP_WAIT_TIME_S": "120", "NCCL_DEBUG": "INFO", "EXTRA": "1"}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounts["/models"] == {
            "name": "shared",
            "mountPath": "/models",
            "subPath": "hub/models",
            "readOnly": True,
        }
        assert set(mounts) == {"/dev/shm", "/etc/rlpipe", "/shared", "/models"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for template in (job["spec"]["submitterPodTemplate"], *_ray_pods(job)):
        spec = template["spec"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}] and spec["serviceAccountName"] == "trainer"
        assert spec["priorityClassName"] == "high" and spec["containers"][0]["image"] == "registry.example/rlpipe:gpu"


def test_every_pod_satisfies_the_restricted_standard(tmp_path):
    _, job = _documents(tmp_path, EVERYTHING.replace("devices: {rdma/hca_shared: 1}", "devices: {}"))
    for template in (job["spec"]["submitterPodTemplate"], *_ray_pods(job)):
        pod, container = template["spec"]["securityContext"], template["spec"]["containers"][0]["securityContext"]
        assert pod["runAsNonRoot"] is True and pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] == 1234
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert template["spec"]["automountServiceAccountToken"] is False


def test_the_job_reads_the_users_configuration(tmp_path):
    """Their own file, wherever it lies, with overrides and all."""
    own = tmp_path / "own.yaml"
    own.write_text(f"base: {DEMO}\nrun: {{iterations: 7}}\n")
    file = tmp_path / "cluster.yaml"
    file.write_text(EVERYTHING)
    settings = [*SHARED, "rollout.sampling.temperature=0.7"]
    configuration, job = yaml.safe_load_all(launch(own, settings, str(file)).text)
    arrived = tmp_path / "config.yaml"
    arrived.write_text(configuration["data"]["config.yaml"])
    assert load_config(arrived) == load_config(own, settings)
    name = configuration["metadata"]["name"]
    assert name == job["metadata"]["name"] == "a-1"
    assert all(
        {"name": "configuration", "configMap": {"name": name}} in template["spec"]["volumes"]
        for template in _ray_pods(job)
    )
    assert job["spec"]["entrypoint"].startswith("rlpipe train /etc/rlpipe/config.yaml ray.address=auto ray.nodes=3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.directory=runs"], r"run.directory = runs: name places below a volume .*\(/shared, /models\)"),
        (["model.path=/home/me/policy"], "model.path = /home/me/policy"),
        (["model.path=runs/policy"], "model.path = runs/policy"),
        (["model.reference_path=../reference"], r"model.reference_path = \.\./reference"),
        (["data.train.0.path=data/rows.jsonl"], r"data.train\[0\].path = data/rows.jsonl"),
        (["eval.datasets.0.path=/sharedother/x.jsonl"], r"eval.datasets\[0\].path = /sharedother/x.jsonl"),
    ],
)
def test_what_pods_do_not_share_is_named(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        _documents(tmp_path, EVERYTHING, *settings)


def test_names_of_the_hub_and_what_the_image_holds_need_no_volume(tmp_path):
    held = sorted((PROJECT / "configs/models").iterdir())[0].relative_to(PROJECT)
    _documents(tmp_path, EVERYTHING, "model.reference_path=Qwen/Qwen3-8B@main", "eval.datasets.0.path=openai/gsm8k")
    _documents(tmp_path, EVERYTHING, f"model.reference_path={held}")


def test_shared_memory_beyond_a_pods_memory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="shared_memory_gigabytes is 900, which is part of the 800"):
        _documents(tmp_path, EVERYTHING.replace("shared_memory_gigabytes: 200", "shared_memory_gigabytes: 900"))


def test_a_merge_replaces_lists_without_names_and_removes_by_null():
    under = {"args": [1, 2], "volumes": [{"name": "a", "x": 1}, {"name": "b"}], "keep": {"a": 1}, "gone": 1}
    over = {"args": [3], "volumes": [{"name": "a", "y": 2}, {"name": "c"}], "keep": {"b": 2}, "gone": None}
    assert merge_named(under, over) == {
        "args": [3],
        "volumes": [{"name": "a", "x": 1, "y": 2}, {"name": "b"}, {"name": "c"}],
        "keep": {"a": 1, "b": 2},
    }
    mounts = [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]
    assert merge_named({"mounts": mounts}, {"mounts": mounts[:1]}) == {"mounts": mounts[:1]}


KUBECTL = """#!/usr/bin/env bash
echo "$*" >>"$RECORD/calls"
case "$*" in
  *"get rayjob a-1"*) cat "$RECORD/rayjob.json" ;;
  *"get pods"*) echo '{"items": [{"metadata": {"name": "head-0"}, "spec": {"nodeName": "n1"},
                                  "status": {"phase": "Running"}}]}' ;;
  *"apply -f -"*) cat >"$RECORD/applied"; exit 7 ;;
esac
"""
STATUS = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "rayClusterName": "a-1-xyz", "jobId": "id-1"}


def test_kubectl_is_asked_for_the_job(tmp_path, monkeypatch):
    """With a stand-in for kubectl, since there is no API server here."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    (tmp_path / "rayjob.json").write_text(json.dumps({"status": STATUS}))
    (tmp_path / "cluster.yaml").write_text(EVERYTHING)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path))
    run = [str(DEMO), "--cluster", str(tmp_path / "cluster.yaml"), *SHARED]

    assert CliRunner().invoke(app, ["launch", *run]).exit_code == 7
    assert (tmp_path / "applied").read_text() == launch(DEMO, SHARED, str(tmp_path / "cluster.yaml")).text
    told = CliRunner().invoke(app, ["launch", "status", *run]).output
    assert told == "rayjob a-1: Running, driver RUNNING\npod head-0: Running, n1\n"
    assert "stopped and deleted" in CliRunner().invoke(app, ["launch", "cancel", *run]).output
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2:] == [
        "--namespace=training exec head-0 -- ray job stop id-1",
        "--namespace=training delete rayjob/a-1 configmap/a-1",
    ]
    assert "--selector=ray.io/cluster=a-1-xyz,ray.io/node-type=head" in calls[-3]  # the driver runs in this pod alone
    CliRunner().invoke(app, ["launch", "cancel", "--now", *run])
    assert sum("job stop" in call for call in (tmp_path / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("2026-11-30_7B", "run-2026-11-30-7b"),
        ("_", "run"),
        ("A." * 30, "-".join("a" * 24)),
        ("9" * 60, "run-" + "9" * 43),
    ],
)
def test_a_job_has_a_name_that_kuberay_takes(run, name):
    """It refuses one that does not begin with a letter, or is longer than 47 characters."""
    assert job_name(run) == name and re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", name)
