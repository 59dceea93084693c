"""A folder with an adapter in PEFT's layout: what it says, whether it is the configured one, how it is written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actor.hf.adapter_table import AdaptedWeight, adaptable_weights, peft_targets
from actor.hf.safetensors_reader import HfCheckpoint
from actor.hf.weight_table import Source
from rlpipe.config.lora import LoraConfig
from rlpipe.model.config_file import read_json_object
from rlpipe.model.description import TrainableModel
from rlpipe.shared.errors import ModelError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN = {
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
}
"""What an adapter that this program can train has in its configuration, or leaves out."""


def check_adapter_folder(folder: Path, table: Sequence[AdaptedWeight], lora: LoraConfig) -> None:
    """Raise ModelError unless the folder's adapter is the configured one; reads headers alone."""
    if not (folder / ADAPTER_CONFIG).exists():
        raise ModelError(f"actor.lora.start_path: {folder} has no {ADAPTER_CONFIG}: give the folder of a PEFT adapter")
    config = read_json_object(folder / ADAPTER_CONFIG)
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora}
    for key, value in wanted.items():
        if config.get(key, False) != value:
            raise ModelError(
                f"{folder / ADAPTER_CONFIG} has {key} = {config.get(key)}, the configuration's actor.lora has {value}: "
                "make them equal"
            )
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise ModelError(f"{folder / ADAPTER_CONFIG} has {key} = {config[key]}, which cannot be trained here")
    with HfCheckpoint(folder) as files:
        # PEFT saves the embedding and the head, too, where they are targets: copies of the model's own.
        names = [name for name in files.files if not name.endswith(".base_layer.weight")]
        shapes = {name: files.shape(name) for name in names}
    expected = {source.name: source.shape for one in table for source in sources_of(one)}
    wrong = [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is not a target" for name in shapes if name not in expected]
    wrong += [
        f"{name} has shape {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ModelError(
            f"the adapter in {folder} is not the one of actor.lora: {'; '.join(wrong[:3])}{more}: give the rank, "
            "targets and experts that it was trained with"
        )


def adapter_config(
    table: Sequence[AdaptedWeight], lora: LoraConfig, model: TrainableModel, base: str
) -> dict[str, Any]:
    """The adapter_config.json that PEFT reads."""
    adaptable = [entry for entry, _ in adaptable_weights(model, lora, padded_vocab_size=model.vocab_size)]
    modules, parameters = peft_targets(model, table, adaptable)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "init_lora_weights": True if lora.init == "kaiming" else lora.init,
        "bias": "none",
        "inference_mode": True,
    }


def check_equal_experts(files: HfCheckpoint, adapted: AdaptedWeight) -> None:
    """Raise ModelError unless every expert has the same adapter, as one that they share does."""
    for source in sources_of(adapted):
        stored = files.read_whole(source.name)
        if not torch.equal(stored, of_every_expert(stored, source.name, adapted)):
            raise ModelError(
                f"{source.name} in {files.model_dir} has experts whose adapters differ: set actor.lora.experts to each"
            )


def of_every_expert(factor: torch.Tensor, name: str, adapted: AdaptedWeight) -> torch.Tensor:
    """A factor that experts share, of which only the first one's values are there, with those of all."""
    count = adapted.weight.sources[0].shape[0]
    if name == adapted.a.sources[0].name:
        return factor.view(count, -1, factor.shape[1])[:1].expand(count, -1, -1).flatten(0, 1).contiguous()
    return factor.view(len(factor), -1, count)[..., :1].expand(-1, -1, count).flatten(1).contiguous()


def sources_of(adapted: AdaptedWeight) -> list[Source]:
    """The tensors of both factors as PEFT names them."""
    return [*adapted.a.sources, *adapted.b.sources]


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Both files of an adapter, into a folder that is there."""
    from safetensors.torch import save_file

    weights = folder / ADAPTER_WEIGHTS
    weights.touch()
    mode = weights.stat().st_mode
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(mode)  # safetensors lets no other user read, who may be the one that serves
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
