"""Model folders of published sizes that take no room: their weights are holes of a sparse file."""

import json
import math
import shutil
from pathlib import Path

from actor.hf.weight_table import weight_table
from rlpipe.model.model_reader import trainable_model
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.project_files import MODELS

_FILE_BYTES = 4 * 2**30  # of one file at most, as they are published


def write_true_size_model(name: str, folder: Path) -> Path:
    """The model of configs/models/`name`, with a byte tokenizer and weights of zeros."""
    folder.mkdir(parents=True)
    shutil.copy(MODELS / name / "config.json", folder)
    byte_tokenizer().save_pretrained(folder)
    model = trainable_model(folder)
    sources = {
        source.name: source.shape
        for entry in weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=False)
        if entry.copy_of is None
        for source in entry.sources
    }
    files, size = [{}], 0
    for tensor, shape in sources.items():
        size += 2 * math.prod(shape)
        if size > _FILE_BYTES:
            files, size = [*files, {}], 2 * math.prod(shape)
        files[-1][tensor] = shape
    for number, tensors in enumerate(files):
        _write_holes(folder / f"model-{number}.safetensors", tensors)
    index = {tensor: f"model-{number}.safetensors" for number, tensors in enumerate(files) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for tensor, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
