"""What benchmarks/whole_step.py runs: the policy, the prompts, one configuration for each case, and its plan."""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from layer_shapes import hybrid_config, text_model

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.config.save import resolved_yaml
from rlpipe.estimate.run_estimate import Plan, plan
from rlpipe.training.trained_share import planned_model

MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"
PROJECT = Path(__file__).resolve().parent.parent
_MOST_LAYERS = 40
_PERIOD_LAYERS = 4
_DISK_SHARE = 0.8


@dataclass(frozen=True)
class Case:
    """One run: forced length of responses, guard of collectives, kernel of Gated DeltaNet, rank of adapters or 0."""

    response_tokens: int
    guard: str
    gdn: str
    lora: int

    @property
    def trained(self) -> str:
        return f"lora {self.lora}" if self.lora else "full"

    @property
    def name(self) -> str:
        return f"{self.response_tokens}-{self.guard}-{self.gdn}-{self.trained.replace(' ', '')}"


@dataclass(frozen=True)
class Setup:
    """What all cases of one command share."""

    options: argparse.Namespace
    folder: Path
    cluster: ClusterConfig

    @property
    def dtype(self) -> str:
        return "float32" if self.options.tiny else "bfloat16"

    @property
    def prompt_tokens(self) -> int:
        return 16 if self.options.tiny else 256

    def shape(self, layers: int) -> dict[str, Any]:
        """config.json of the policy."""
        if self.options.model:
            return text_model(json.loads((MODELS / self.options.model / "config.json").read_text()))
        return hybrid_config(layers, self.options.vocabulary, self.options.tiny)

    def layers(self, cases: list[Case]) -> int:
        """Of the policy: all of a whole model, as many as are asked for, or as fit."""
        if self.options.model:
            return int(self.shape(0)["num_hidden_layers"])
        return self.most_layers(cases) if self.options.layers == "auto" else int(self.options.layers)

    def most_layers(self, cases: list[Case]) -> int:
        """The most layers, in whole periods of three Gated DeltaNet and one attention layer, with which all cases fit
        by `plan` and the policy's files on the disk."""
        best = 0
        for layers in range(_PERIOD_LAYERS, _MOST_LAYERS + 1, _PERIOD_LAYERS):
            folder = self.folder / f"shape-{layers}"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(self.shape(layers)))
            plans = [self.plan(self.write_configuration(case, str(folder))) for case in cases]
            room = shutil.disk_usage(self.folder).free * _DISK_SHARE
            if any(one.problems for one in plans) or 2 * plans[0].model.parameters > room:
                break
            best = layers
            if self.options.tiny:
                break
        if not best:
            sys.exit(f"not even {_PERIOD_LAYERS} layers fit by `rlpipe plan`: use more GPUs, or give --layers")
        return best

    def write_prompts(self) -> None:
        """As many as all iterations take, each of one length and different in its number."""
        texts = [f"{index:06d} " for index in range(self.options.prompts * self.options.iterations)]
        rows = [{"prompt": text.ljust(self.prompt_tokens, "x"), "label": text.strip()} for text in texts]
        self._prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_configuration(self, case: Case, policy: str) -> Path:
        """The resolved configuration of `case` as a file; settings of the command line go last."""
        unresolved = self.folder / f"{case.name}.settings.yaml"
        unresolved.write_text(yaml.safe_dump(self._settings(case, policy)))
        path = self.folder / f"{case.name}.yaml"
        path.write_text(resolved_yaml(load_config(unresolved, self.options.settings)))
        return path

    def plan(self, configuration: Path) -> Plan:
        config = load_config(configuration)
        return plan(config, planned_model(config), self.cluster)

    def _settings(self, case: Case, policy: str) -> dict[str, Any]:
        options = self.options
        return {
            "base": str(PROJECT / "configs/recipes/dapo_math.yaml"),
            "run": {"name": case.name, "iterations": options.iterations, "directory": str(self.folder)},
            "model": {"path": policy},
            "data": {
                "train": [{"name": "prompts", "path": str(self._prompts), "apply_chat_template": False}],
                "max_prompt_tokens": self.prompt_tokens,
            },
            "eval": {"datasets": []},
            "rollout": self._rollout(case),
            "algorithm": {"kl": {"coefficient": 0.001 if options.kl else 0.0}},
            "actor": self._actor(case),
            "reward": {"workers": 2},
            "ray": {"colocate": True},
            "checkpoint": {"interval_iterations": 0, "save_hf": "never"},  # of many layers it takes a minute
            "fault": {"grace_seconds": 0.0},  # at the benchmark's limit there is nobody to go on from a checkpoint
            "trackers": {"tensorboard": False, "wandb": "off"},
        }

    def _rollout(self, case: Case) -> dict[str, Any]:
        options = self.options
        engines = options.gpus // options.engine_tensor
        return {
            "prompts_per_iteration": options.prompts,
            "samples_per_prompt": options.samples,
            "max_response_tokens": case.response_tokens,
            "sampling": {"ignore_eos": True},
            "engines": engines,
            "engine": {
                "dtype": self.dtype,
                "tensor_parallel": options.engine_tensor,
                "memory_fraction": 0.75,
                "max_running_requests": -(-options.prompts * options.samples // engines),
                "deterministic": False,
            },
        }

    def _actor(self, case: Case) -> dict[str, Any]:
        options = self.options
        adapters = {"lora": {"rank": case.lora}, "optimizer": {"cpu_offload_fraction": 0.0}} if case.lora else {}
        return adapters | {
            "dtype": self.dtype,
            "processes": options.gpus,
            "parallel": {
                "tensor": options.tensor,
                "sequence": options.sequence,
                "context": options.context,
                "expert": options.expert,
            },
            "max_tokens_per_gpu": "auto",
            "recompute": {"granularity": "auto"},
            "gdn_backend": case.gdn,
            "threads": max(1, self.cluster.node.cpus // options.gpus - 2),
            "comm_guard": self._guard(case.guard),
        }

    def _guard(self, guard: str) -> dict[str, Any]:
        """`selective` is the published policy; `every_call` one without rules, so that each call is probed."""
        if guard == "off":
            return {"mode": "off"}
        if guard == "selective":
            return {"mode": "enforce"}
        policy = self.folder / "every_call.yaml"
        policy.write_text(yaml.safe_dump({"default": "guard", "rules": []}))
        return {"mode": "enforce", "policy": str(policy), "ttl_seconds": 0.0}

    @property
    def _prompts(self) -> Path:
        return self.folder / "prompts.jsonl"


def planned_figures(estimate: Plan) -> dict[str, float]:
    """What `plan` says: seconds by phase, and under names of their own speeds and bytes."""
    seconds, rollout = dict(estimate.seconds), estimate.config.rollout
    figures = seconds | {"step": sum(seconds.values()), "host_bytes": float(sum(estimate.memory.host.values()))}
    if "rollout" in seconds:
        tokens = rollout.prompts_per_iteration * rollout.samples_per_prompt * rollout.max_response_tokens
        figures["rollout_tokens_per_second"] = tokens / seconds["rollout"]
    needs = {need.name: float(need.total) for need in estimate.needs}
    if "GPU while the actor works" in needs:
        parts = {part: size for part, size in estimate.memory.actor.items() if part != "CUDA and NCCL"}
        figures["actor_tensor_bytes"] = float(sum(parts.values()) + estimate.kept_state_bytes)
        figures["actor_gpu_bytes"] = needs["GPU while the actor works"] + estimate.kept_state_bytes
        figures["engine_gpu_bytes"] = needs["GPU while the engine works"] + estimate.held_beside_engines_bytes
    return figures
