"""The layouts that are struck, and when a run counts as the same as another one."""

from pathlib import Path

from tests.rlpipe.run_support import metric_rows

LAYOUTS = {
    "one process": (),
    "two tensor ranks": ("actor.processes=2", "actor.parallel.tensor=2"),
    "two pipeline stages": ("actor.processes=2", "actor.parallel.pipeline=2"),
    "shared memory": ("ray.colocate=true", "ray.sleep=always"),
}
PROMISED = ("rollout/reward_mean", "train/loss", "train/gradient_norm", "train/kl_loss", "eval/held_out/reward_mean")


def assert_same(whole: Path, disturbed: Path) -> None:
    """Every row once, and the bits of the run that nothing disturbed."""
    rows, expected = metric_rows(disturbed), metric_rows(whole)
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in expected]
    for name in PROMISED:
        assert [row.get(name) for row in rows] == [row.get(name) for row in expected]
    for name in ("policy/model.safetensors", "samples.jsonl"):
        assert (whole / name).read_bytes() == (disturbed / name).read_bytes()
