"""Which of SGLang's model files an engine needs. SGLang imports all two hundred, which takes longer than the rest."""

import re

from rlpipe.model.model_reader import describe_model
from rollout.sglang_source import sglang_folder


def unneeded_model_modules(model_path: str) -> list[str]:
    """Modules of `sglang.srt.models` that do not define the architecture of the model in `model_path`.

    Empty when no module defines it: SGLang then says so itself.
    """
    definition = re.compile(rf"^class {re.escape(describe_model(model_path).architecture)}\(", re.M)
    others = []
    files = sorted((sglang_folder() / "srt" / "models").glob("*.py"))
    for file in files:
        if not definition.search(file.read_text()):
            others.append(file.stem)
    return others if len(others) < len(files) else []
