"""Which of SGLang's model files an engine needs. SGLang imports all two hundred, which takes longer than the rest."""

import importlib.util
import json
import re
from pathlib import Path


def unneeded_model_modules(model_path: str) -> list[str]:
    """Modules of `sglang.srt.models` that do not define an architecture of the model in `model_path`.

    Empty when no module defines one: SGLang then says so itself.
    """
    wanted = json.loads((Path(model_path) / "config.json").read_text()).get("architectures") or []
    definition = re.compile(rf"^class ({'|'.join(map(re.escape, wanted))})\(", re.M)
    others = []
    files = sorted(_models_folder().glob("*.py"))
    for file in files:
        if not wanted or not definition.search(file.read_text()):
            others.append(file.stem)
    return others if len(others) < len(files) else []


def _models_folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "srt" / "models"
