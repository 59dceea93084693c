"""Write the policy as a folder in Hugging Face layout that transformers, SGLang and vLLM load as it is."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actor.hf.export import iter_export
from actor.hf.safetensors_reader import HfCheckpoint
from actor.hf.tensor_placement import has_mtp
from actor.models.policy_model import policy_of
from rlpipe.model.config_file import read_config
from rlpipe.model.description import TrainableModel
from rlpipe.shared.disk_errors import written_whole
from rlpipe.shared.policy_facts import PolicyFacts

SHARD_BYTES = 4 * 1024**3
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
_CHAT_TEMPLATES = "additional_chat_templates"  # where transformers keeps all chat templates but the default one


def save_hf(
    chunks: Sequence[torch.nn.Module],
    model: TrainableModel,
    output_dir: str | Path,
    source_dir: str | Path,
    facts: PolicyFacts | None = None,
) -> None:
    """Write sharded safetensors, config.json, generation config, tokenizer, chat templates, and what `facts` tell.

    Collective. Tensors of `source_dir` that the policy does not hold (vision tower, untrained `mtp.*`) are carried
    over. Only global rank 0 writes, one shard at a time, under a hidden name: a folder of that name is whole, and takes
    the place of an older one at once. A barrier ends it. Raises ResourceError on a full disk.
    """
    output, source = Path(output_dir), Path(source_dir)
    partial = output.with_name(f".{output.name}.partial")
    with written_whole(partial):
        writer = _ShardWriter(partial) if dist.get_rank() == 0 else None
        exported = set()
        for name, tensor in iter_export(chunks, model, with_mtp=has_mtp(chunks)):
            exported.add(name)
            if writer is not None and tensor is not None:
                writer.add(name, tensor.to("cpu", copy=True))  # it may be a view of a live parameter
        if writer is not None:
            with HfCheckpoint(source) as files:
                for name in files.files:
                    if name not in exported and not (name == "lm_head.weight" and model.tied_embeddings):
                        writer.add(name, files.read_whole(name))
            writer.finish()
            _copy_companions(source, partial)
            _write_configs(source, partial, policy_of(chunks[0]).config.params_dtype)
            if facts is not None:
                facts.write(partial)
            replace_folder(partial, output)
    dist.barrier()


def _copy_companions(source: Path, output: Path) -> None:
    """Everything small that belongs to a model folder except weights, and the page that describes another model."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith(".") and path.name != "README.md":
            shutil.copyfile(path, output / path.name)
    if (source / _CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / _CHAT_TEMPLATES, output / _CHAT_TEMPLATES)


def _write_configs(source: Path, output: Path, dtype: torch.dtype) -> None:
    """config.json with the dtype of the weights that are there now; a generation config where the source has none."""
    raw = dict(read_config(source).raw)
    for part in (raw, raw.get("text_config") or {}):
        part.pop("torch_dtype", None)  # the older name
        part["dtype"] = str(dtype).removeprefix("torch.")
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    if not (output / "generation_config.json").exists():
        text = raw.get("text_config") or raw
        ends = {f"{role}_token_id": text.get(f"{role}_token_id") for role in ("bos", "eos", "pad")}
        generation: dict[str, Any] = {key: value for key, value in ends.items() if value is not None}
        (output / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True}, indent=2) + "\n")


def replace_folder(partial: Path, final: Path) -> None:
    """Let `partial` take the place of `final`, which may be there."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


class _ShardWriter:
    """Collects tensors and writes a file whenever `SHARD_BYTES` are together."""

    def __init__(self, output: Path) -> None:
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        self.output = output
        self.pending: dict[str, torch.Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []
        self.pending_bytes = self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor.contiguous()
        self.pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        path = self.output / f"part-{len(self.files) + 1:05d}.safetensors"
        path.touch()
        mode = path.stat().st_mode
        save_file(self.pending, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors lets no other user read, who may be the one that serves
        self.files.append((path, list(self.pending)))
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Give the files their final names, which hold their number, and write the index."""
        if self.pending:
            self._flush()
        count, weight_map = len(self.files), {}
        for number, (path, names) in enumerate(self.files, 1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            path.rename(self.output / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
