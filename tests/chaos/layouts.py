"""The layouts that are struck, and when a run counts as the same as another one."""

from pathlib import Path

from tests.rlpipe.run_support import UNTRACKED, metric_rows, run_arguments

LAYOUTS = {
    "one process": (),
    "two tensor ranks": ("actor.processes=2", "actor.parallel.tensor=2"),
    "two pipeline stages": ("actor.processes=2", "actor.parallel.pipeline=2", "prepare.policy.layers=2"),
    "shared memory": ("ray.colocate=true", "ray.sleep=always"),
}
PROMISED = ("rollout/reward_mean", "train/loss", "train/gradient_norm", "train/kl_loss", "eval/held_out/reward_mean")


def arguments_of(layout: str, folder: Path, *more: str) -> list[str]:
    """Of a small run in `folder`. Each layout has its own policy, which its runs share."""
    policy = f"model.path={folder.parent}/policy-{layout.replace(' ', '-')}"
    return run_arguments(folder, *UNTRACKED, policy, *LAYOUTS[layout], *more)


def assert_same(whole: Path, disturbed: Path) -> None:
    """Every row once, and the bits of the run that nothing disturbed."""
    rows, expected = metric_rows(disturbed), metric_rows(whole)
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in expected]
    for name in PROMISED:
        assert [row.get(name) for row in rows] == [row.get(name) for row in expected]
    for name in ("policy/model.safetensors", "samples.jsonl"):
        assert (whole / name).read_bytes() == (disturbed / name).read_bytes()
