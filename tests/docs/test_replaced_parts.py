"""What is replaced inside other packages: declared everywhere, and as it was when it was read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.shared.replaced_parts import ReplacedPartError, relies_on

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts"))

import replaced_parts  # noqa: E402

ABSENT_WITHOUT_GPU = {"triton", "tilelang", "flashinfer", "cutlass"}


@pytest.fixture(scope="module")
def parts():
    return replaced_parts.declared_parts()


def test_originals_are_those_that_were_read(parts):
    result = replaced_parts.compare(parts, replaced_parts.read_record())
    assert not result.changed, "\n".join(result.changed)
    assert {line.partition(".")[0] for line in result.skipped} <= ABSENT_WITHOUT_GPU


def test_every_part_was_read_in_some_version_and_none_is_recorded_that_is_gone(parts):
    assert set(replaced_parts.read_record()) == {part.target for part in parts}


def test_every_place_that_reaches_into_another_package_is_declared(parts):
    points = replaced_parts.touch_points()
    missing = replaced_parts.undeclared(parts, points)
    assert not missing, missing
    assert len(points) > len({part.file for part in parts})


def test_a_changed_and_a_lost_original_are_named_and_no_other(parts):
    record = replaced_parts.read_record()
    target = "torch.distributed.distributed_c10d:_new_process_group_helper"
    gone = replaced_parts.Part("torch.distributed.distributed_c10d:_no_such", "here.py:1", True, "why", "when")
    words = replaced_parts.Part(
        "ray._private.node:Node.__init__", "here.py:2", False, "why", "when", ("no such words",)
    )
    result = replaced_parts.compare([*parts, gone, words], {**record, target: {"0" * 12: "1.0"}})
    assert [line.partition(" ")[0] for line in result.changed] == [words.target, target, gone.target]
    assert "not what was read (1.0)" in result.changed[1]
    assert "actor/weight_transport.py" in result.changed[1]


def test_an_upgrade_is_looked_at_before_it_is_installed(tmp_path):
    """A ray of our own in a folder: one part as installed, one changed, all others gone."""
    folder = tmp_path / "ray" / "_private"
    folder.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    kept = replaced_parts.source_of("ray._private.utils:set_sigterm_handler")
    (folder / "utils.py").write_text(kept)
    (folder / "worker.py").write_text("def connect():\n    pass\n")
    (tmp_path / "ray-9.9.dist-info").mkdir()
    (tmp_path / "ray-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 9.9\n")
    command = [sys.executable, str(PROJECT / "scripts" / "replaced_parts.py"), "--in", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True)
    changed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("changed: ")]
    assert done.returncode == 1, done.stderr
    assert "ray._private.worker:connect" in changed
    assert "ray._private.utils:set_sigterm_handler" not in changed
    assert all(target.startswith("ray.") for target in changed)
    skipped, without = (
        {line.removeprefix(kind).partition(".")[0] for line in done.stdout.splitlines() if line.startswith(kind)}
        for kind in ("not here: ", "without an extra: ")
    )
    assert without == set(replaced_parts.EXTRAS) and "megatron" in skipped and not without & skipped


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.distributed_c10d import _world",
        "import torch._dynamo.config",
        "import torch\n\ntorch.cuda.synchronize = print",
        "import torch\n\ntorch._dynamo.reset()",
        "def f(engine):\n    return engine._scheduler_init_result",
        "from torch import Tensor\n\nsetattr(Tensor, 'cuda', print)",
        "from sglang.srt.layers import sampler as s\n\n\nclass A(s.Sampler):\n    def _sample_from_probs(self): ...",
    ],
)
def test_a_new_touch_point_is_found(tmp_path, line):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "new.py").write_text(f"{line}\n")
    points = replaced_parts.touch_points(tmp_path)
    assert replaced_parts.undeclared(replaced_parts.declared_parts(tmp_path), points)


def test_own_private_names_and_public_uses_are_no_touch_points(tmp_path):
    (tmp_path / "actor").mkdir()
    text = "import torch\n\n\nclass A:\n    def _f(self, other):\n        self._x = other._f(torch.ones(1))\n"
    (tmp_path / "actor" / "new.py").write_text(text)
    assert replaced_parts.touch_points(tmp_path) == []


@pytest.mark.parametrize("target", ["json:no_such_name", "json.no_such_module:dumps", "json:JSONDecoder.no_such"])
def test_a_part_that_is_gone_is_refused_with_what_to_do(target):
    with pytest.raises(ReplacedPartError, match="docs/upgrading.md") as caught:
        relies_on(target, why="rows are read", drop_when="never").original()
    assert target in str(caught.value)
    assert "rows are read" in str(caught.value)


def test_a_part_that_is_there_is_found():
    assert relies_on("json:JSONDecoder.decode", why="", drop_when="").original() is json.JSONDecoder.decode
