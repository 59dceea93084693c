"""Which of SGLang's model files an engine needs. SGLang imports all two hundred, which takes longer than the rest."""

import re

from rlpipe.model.config_file import read_config
from rollout.sglang_source import sglang_folder


def unneeded_model_modules(model_path: str) -> list[str]:
    """Modules of `sglang.srt.models` that do not define an architecture of the model in `model_path`.

    Empty when no module defines one: SGLang then says so itself.
    """
    wanted = read_config(model_path).architectures
    definition = re.compile(rf"^class ({'|'.join(map(re.escape, wanted))})\(", re.M)
    others = []
    files = sorted((sglang_folder() / "srt" / "models").glob("*.py"))
    for file in files:
        if not wanted or not definition.search(file.read_text()):
            others.append(file.stem)
    return others if len(others) < len(files) else []
