"""The RayJob of a run, asked for with kubectl."""

import json
from typing import Any

from rlpipe.commands.launch.kubernetes import job_name
from rlpipe.commands.launch.scheduler_program import output_of


class KubernetesJobs:
    """The RayJob of the run `name` in `namespace`."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name = job_name(name)
        self._namespace = namespace

    def describe(self) -> list[str]:
        """What KubeRay says of the job, and where its pods are."""
        status = self._status()
        deployment, job = status.get("jobDeploymentStatus") or "not taken up yet", status.get("jobStatus")
        message = f": {status['message']}" if status.get("message") else ""
        lines = [f"rayjob {self._name}: {deployment}{f', driver {job}' if job else ''}{message}"]
        for pod in self._pods(status):
            facts = pod.get("status", {})
            node = pod.get("spec", {}).get("nodeName", "no node yet")
            lines.append(f"pod {pod['metadata']['name']}: {facts.get('phase', 'unknown')}, {node}")
        return lines

    def cancel(self, now: bool) -> list[str]:
        """Have the driver save and end, unless `now`; then delete the job with its pods and configuration."""
        status = self._status()
        if not now and status.get("jobStatus") == "RUNNING":
            for pod in self._pods(status, "ray.io/node-type=head"):
                self._kubectl("exec", pod["metadata"]["name"], "--", "ray", "job", "stop", status["jobId"])
        self._kubectl("delete", f"rayjob/{self._name}", f"configmap/{self._name}")
        return [f"rayjob {self._name}: {'deleted' if now else 'stopped and deleted'}"]

    def _status(self) -> dict[str, Any]:
        return json.loads(self._kubectl("get", "rayjob", self._name, "--output=json")).get("status") or {}

    def _pods(self, status: dict[str, Any], selector: str = "") -> list[dict[str, Any]]:
        cluster = status.get("rayClusterName")
        if not cluster:
            return []
        labels = ",".join(label for label in (f"ray.io/cluster={cluster}", selector) if label)
        return list(json.loads(self._kubectl("get", "pods", f"--selector={labels}", "--output=json"))["items"])

    def _kubectl(self, *arguments: str) -> str:
        return output_of("kubectl", f"--namespace={self._namespace}", *arguments)
