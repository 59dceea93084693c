"""SGLang's arguments for speculative decoding."""

import json
from pathlib import Path
from typing import Any

from rlpipe.config.draft import DraftConfig
from rlpipe.config.rollout import EngineConfig


def draft_arguments(engine: EngineConfig, model_path: str, sent: bool) -> dict[str, Any]:
    """Of ServerArgs; empty without drafts. sent: weight updates hold those of the drafting layer."""
    draft = engine.draft
    if draft.method == "off":
        return {}
    if draft.method == "ngram":
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": draft.verified_tokens,
            "speculative_ngram_max_bfs_breadth": draft.branches,
            "speculative_ngram_min_bfs_breadth": 1,
        }
    arguments: dict[str, Any] = {
        "speculative_algorithm": "NEXTN",
        # The same folder: SGLang takes its prediction layer, and shares embedding and head with the model.
        "speculative_draft_model_path": model_path,
        "speculative_num_steps": draft.steps,
        "speculative_eagle_topk": draft.branches,
        "speculative_num_draft_tokens": draft.verified_tokens,
        # Otherwise they would be lost when the engine sleeps, and no update brings them back.
        "enable_draft_weights_cpu_backup": not sent,
    }
    return arguments | ({"speculative_adaptive": True} if draft.method == "auto" else {})


def chosen_steps(draft: DraftConfig, directory: Path) -> dict[str, Any]:
    """For `auto` the argument that names a file, written into `directory`, with the numbers of steps that SGLang
    prepares at every batch size: those configured, and none (rollout/sglang_patches/draft_choice.py chooses)."""
    if draft.method != "auto":
        return {}
    file = directory / "draft_steps.json"
    file.write_text(json.dumps({"1": {"candidate_steps": [0, draft.steps]}}))
    return {"speculative_adaptive_config": str(file)}
