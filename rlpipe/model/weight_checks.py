"""Which weights a model folder holds, and what is wrong with them, said before they are trained."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.model.description import TrainableModel
from rlpipe.shared.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 8192
_SAMPLES, _SAMPLE_BYTES = 16, 2**16


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file of a model folder; empty without such files.

    Raises:
        ModelError: the index names a file that is not there, or a file is not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            files = {name: model_dir / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a readable index of weights ({error}): download it again") from None
        if missing := sorted({str(path) for path in files.values() if not path.exists()}):
            raise ModelError(f"{index} names {missing[0]}, which does not exist: download the model again")
        return files
    files = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}): download the model again") from None
    return files


def check_tied_head(model: TrainableModel, folder: Path) -> None:
    """Raise ModelError where the folder of a tied model holds an output layer that is not its embedding: transformers
    and SGLang would use the embedding and drop it. Reads both, where both are there."""
    files, embedding = tensor_files(folder), f"{model.weight_prefix}embed_tokens.weight"
    if not model.tied_embeddings or "lm_head.weight" not in files or embedding not in files:
        return
    import torch

    pairs = zip(_rows(files["lm_head.weight"], "lm_head.weight"), _rows(files[embedding], embedding), strict=False)
    if any(one.shape != other.shape or not torch.equal(one.float(), other.float()) for one, other in pairs):
        raise ModelError(
            f"{folder} stores an lm_head.weight unlike {embedding}, but its config.json has tie_word_embeddings = true"
            ": set it to false (at the top level) to use the stored head, or remove the head from the files"
        )


def check_files(folder: Path) -> None:
    """Raise ModelError where a file of weights is empty, cut or damaged, or lacks what the index says of it. Reads
    the headers alone."""
    from safetensors import SafetensorError, safe_open

    files = tensor_files(folder)
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, "np") as tensors:
                stored = frozenset(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}): download the model again") from None
        if lost := sorted(name for name, file in files.items() if file == path and name not in stored):
            raise ModelError(f"{path} lacks {lost[0]}, which the index says it holds: download the model again")


def check_finite(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise ModelError naming a tensor of the folder that holds a NaN or an infinity; `names`: look at these alone.

    Reads what it looks at from beginning to end.
    """
    files = tensor_files(folder)
    for name in files if names is None else names:
        if not all(bool(all_finite(rows.float())) for rows in _rows(files[name], name)):
            raise ModelError(
                f"{name} in {files[name]} holds values that are not finite: the folder is damaged or comes from a "
                "training that diverged; use another one"
            )


def all_finite(tensor: "Tensor") -> "Tensor":
    """Whether no value is a NaN or an infinity, as a tensor [] of its device. The smallest and the largest value tell,
    since a NaN would be both; a flag for each value takes twenty times as long on a CPU."""
    import torch

    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def weights_fingerprint(folder: Path) -> str:
    """A name for the weights in the folder's files: of their sizes and of samples of their content."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(set(tensor_files(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _rows(file: Path, name: str) -> "Iterator[Tensor]":
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        view = tensors.get_slice(name)
        if not view.get_shape():
            yield tensors.get_tensor(name)
            return
        for start in range(0, view.get_shape()[0], _ROWS):
            yield view[start : start + _ROWS]
