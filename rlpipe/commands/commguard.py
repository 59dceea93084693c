"""`rlpipe commguard`: makes the policy of the collectives' memory guard from a few iterations, and shows one."""

from collections.abc import Sequence
from pathlib import Path

from actor.comm_guard.evidence import evidence_table, policy_of, read_evidence
from actor.comm_guard.rules import DEFAULT_RULES, Threshold, load_policy, policy_table, save_policy
from rlpipe.config.load import load_config


def profile(
    config: Path, overrides: Sequence[str], *, iterations: int, output: Path, tolerance_bytes: int, share: float
) -> str:
    """Train for `iterations` while every collective is measured, write the policy to `output`; returns the table.

    tolerance_bytes: fall of driver memory in a later call up to which an operation is skipped. share: the policy's
        threshold. Raises ResourceError where no collective ran on a device.
    """
    from rlpipe.training.opening import Opening
    from rlpipe.training.train import train

    settings = load_config(config, overrides)
    name = f"{settings.run.name}-commguard"
    evidence_folder = (Path(settings.run.directory) / name / "comm_guard").absolute()
    observed = load_config(
        config,
        [
            *overrides,
            f"run.name={name}",
            f"run.iterations={iterations}",
            "warm_start=null",
            "eval.datasets=[]",
            "checkpoint.interval_iterations=0",
            "checkpoint.save_hf=never",
            "actor.comm_guard.mode=observe",
            f"actor.comm_guard.evidence={evidence_folder}",
        ],
    )
    train(observed, Opening(overwrite=True))
    evidence = read_evidence(evidence_folder)
    save_policy(policy_of(evidence, tolerance_bytes, Threshold(share=share)), output)
    return evidence_table(evidence, tolerance_bytes)


def show(policy: Path | None) -> str:
    """A policy as a table; that of published evidence without a path."""
    return policy_table(load_policy(policy or DEFAULT_RULES))
