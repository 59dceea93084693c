"""Which of SGLang's model files an engine needs. SGLang imports all two hundred, which takes longer than the rest."""

import re

from rlpipe.model.model_reader import describe_model
from rollout.sglang_source import sglang_folder

# SGLang's name of the prediction layer of an architecture that begins so, where it drafts by itself.
_DRAFTING = {"Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP", "Qwen3_5": "Qwen3_5ForCausalLMMTP"}


def unneeded_model_modules(model_path: str, drafts: bool = False) -> list[str]:
    """Modules of `sglang.srt.models` that do not define the architecture of the model in `model_path`, nor, where it
    `drafts`, that of its prediction layer.

    Empty when no module defines it: SGLang then says so itself.
    """
    architecture = describe_model(model_path).architecture
    drafting = [name for start, name in _DRAFTING.items() if drafts and architecture.startswith(start)]
    names = "|".join(map(re.escape, [architecture, *drafting]))
    definition = re.compile(rf"^class (?:{names})\(", re.M)
    others = []
    files = sorted((sglang_folder() / "srt" / "models").glob("*.py"))
    for file in files:
        if not definition.search(file.read_text()):
            others.append(file.stem)
    return others if len(others) < len(files) else []
