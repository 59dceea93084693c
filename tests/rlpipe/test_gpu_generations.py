"""What runs on which GPU: one table, and the actor's own choice agrees with it."""

import sys

import pytest

from actor.layers.gdn_backend import Machine, choose_gdn_backend
from rlpipe.estimate.gpu_generations import GENERATIONS, generation_of, support_line
from rlpipe.model.description import GatedDeltaNetSizes
from rlpipe.shared.errors import ResourceError

SIZES = GatedDeltaNetSizes(
    key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4, fused_projections=False
)
PACKAGES = {"fla-core": "0.6", "triton": "3.5", "flash-qla": "0.1.3", "tilelang": "0.1.12"}
PUBLISHED = {
    (7, 5): "older than Ampere",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (10, 3): "Blackwell",
    (12, 0): "Blackwell RTX",
}


@pytest.mark.parametrize(("capability", "name"), PUBLISHED.items(), ids=str)
def test_a_capability_has_its_generation_and_the_actor_s_kernels(capability, name):
    found = generation_of(capability)
    assert found is not None and found.name == name
    machine = Machine(capability, "2.11.0", "13.0", PACKAGES)
    assert choose_gdn_backend("auto", SIZES, "bfloat16", machine).backend == found.gdn[0]
    for backend in ("fla", "flashqla"):
        if backend in found.gdn:
            assert choose_gdn_backend(backend, SIZES, "bfloat16", machine).backend == backend
        else:
            with pytest.raises(ResourceError):
                choose_gdn_backend(backend, SIZES, "bfloat16", machine)
    line = support_line(capability)
    assert "\n" not in line and line.startswith(f"{name} (SM{capability[0]}{capability[1]}): ")


def test_generations_follow_each_other():
    ends = [bound for one in GENERATIONS for bound in (one.first, one.last)]
    assert ends == sorted(ends)
    assert "newer than what rlpipe knows" in support_line((20, 0))
    assert support_line(None).startswith("CPU: ")


def test_engines_on_hopper_attend_by_triton_where_flash_attention_3_is_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('too slow to import for a question')")
    (package / "flash_attn.py").touch()  # its Python part is there without the library, too
    assert "engine attention by triton;" in support_line((9, 0))
    assert "engine attention by flashinfer;" in support_line((8, 0))
    (package / "flash_ops.abi3.so").touch()
    assert "engine attention by fa3;" in support_line((9, 0))
