"""Puts into a wheel what lies beside the packages and belongs to the program; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).resolve().parent
_BUNDLED = (
    "configs/**/*.yaml",
    "configs/models/*/config.json",
    "requirements/[cg]pu.txt",
    "cards/*.yaml",
    "benchmarks/results/*.json",
    "scripts/local.sh",
    "scripts/ray_*.sh",
    "scripts/slurm.sbatch",
    "scripts/kubernetes/rayjob.yaml",
)


class BuildWithBundledFiles(build_py):
    """rlpipe/shared/project_files.py finds them: in `rlpipe/bundled`, or in the checkout where that is missing."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "rlpipe" / "bundled"
        shutil.rmtree(folder, ignore_errors=True)
        for pattern in _BUNDLED:
            for file in _ROOT.glob(pattern):
                target = folder / file.relative_to(_ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


setup(cmdclass={"build_py": BuildWithBundledFiles})
