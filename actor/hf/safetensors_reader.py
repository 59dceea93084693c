"""Read slices of the safetensors files of a Hugging Face model folder and count every byte."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from actor.hf.weight_table import PADDING, Entry, weight_table
from rlpipe.model.description import TrainableModel
from rlpipe.model.weight_checks import tensor_files
from rlpipe.shared.errors import ModelError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class HfCheckpoint:
    """An open model folder (a context manager). `bytes_read` counts the tensor data that was asked for."""

    def __init__(self, model_dir: str | Path) -> None:
        self.model_dir = Path(model_dir)
        self.files = tensor_files(self.model_dir)
        if not self.files:
            raise ModelError(f"{self.model_dir} has no *.safetensors files: give a folder with a Hugging Face model")
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors calls it."""
        return str(self._slice(name).get_dtype())

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self.files[name]
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
            except SafetensorError as error:
                raise ModelError(f"{path} is not a readable safetensors file ({error}): download it again") from None
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{name} is listed in the index but not in {path} ({error})") from None

    def read_slice(self, name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """Indices `start` to `stop` of a tensor along `axis` (0 or 1), on the CPU."""
        view = self._slice(name)
        tensor = view[start:stop] if axis == 0 else view[:, start:stop]
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def read_whole(self, name: str) -> torch.Tensor:
        """A complete tensor on the CPU."""
        shape = self.shape(name)
        if not shape:
            tensor = self._open[self.files[name]].get_tensor(name)
            self.bytes_read += tensor.element_size()
            return tensor
        return self.read_slice(name, 0, 0, shape[0])

    def as_stored(self, model: TrainableModel) -> TrainableModel:
        """`model` with its experts stored as in these files, which may differ from the folder it was read from."""
        fused = {name for name in self.files if name.endswith(".mlp.experts.gate_up_proj")}
        return replace(
            model,
            fused_experts=any(not name.startswith("mtp.") for name in fused),
            fused_mtp_experts=any(name.startswith("mtp.") for name in fused),
        )

    def check(self, entries: list[Entry], ignored: tuple[str, ...]) -> tuple[str, ...]:
        """Compare the files with the table before any tensor is read; returns the extra tensors that are left alone.

        ignored: prefixes of names that may stand in the files without being loaded.

        Raises:
            ModelError: a tensor is missing, has another shape, no floating-point values, or is not known.
        """
        wanted = {source.name: source.shape for entry in entries for source in entry.sources}
        missing = [name for name in wanted if name not in self.files]
        extra = [name for name in self.files if name not in wanted]
        unknown = [name for name in extra if not name.startswith(ignored) and not name.endswith("rotary_emb.inv_freq")]
        wrong = [
            f"{name} has shape {list(self.shape(name))} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in self.files and self.shape(name) != shape
        ]
        wrong += [
            f"{name} has values of type {self.dtype(name)}, which are no plain floating-point numbers"
            for name in wanted
            if name in self.files and self.dtype(name) not in _FLOATS
        ]
        problems = [f"{name} is missing" for name in missing] + [f"{name} is not known" for name in unknown] + wrong
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise ModelError(
                f"the weights in {self.model_dir} do not fit its config.json: {'; '.join(problems[:3])}{more}: "
                "nothing was loaded"
            )
        return tuple(extra)


def fill_shard(
    parameter: torch.Tensor,
    entry: Entry,
    rank: int,
    size: int,
    read_slice: Callable[[str, int, int, int], torch.Tensor],
) -> None:
    """Write one rank's shard into `parameter`, on its device and in its dtype, from slices (name, axis, start, stop)
    of its sources, each asked for once.

    Slices go to the device as they are: put together on the host first, they would be copied once more, into memory
    that the system has to make, and converted there by few threads.
    """
    pieces = list(entry.shard(rank, size))
    spans: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        low, high = spans.get(piece.source, (piece.start, piece.stop))
        spans[piece.source] = min(low, piece.start), max(high, piece.stop)
    blocks = {
        source: read_slice(entry.sources[source].name, entry.axis, *span)
        for source, span in spans.items()
        if source != PADDING
    }
    shape = list(entry.sources[0].shape)
    shape[entry.axis] = sum(piece.size for piece in pieces)
    rows, position = parameter.view(shape), 0
    for piece in pieces:
        part = rows.narrow(entry.axis, position, piece.size)
        position += piece.size
        if piece.source == PADDING:
            part.zero_()
            continue
        block = blocks[piece.source].narrow(entry.axis, piece.start - spans[piece.source][0], piece.size)
        part.copy_(block if block.dtype == part.dtype else block.to(part.device))


def unloaded_prefixes(model: TrainableModel, with_mtp: bool) -> tuple[str, ...]:
    """Tensors that may be in the files and are not part of the policy: vision tower, tied head, untrained MTP."""
    return (
        "model.visual.",
        *(() if with_mtp else ("mtp.",)),
        *(("lm_head.",) if model.tied_embeddings else ()),
    )


def check_stored_shapes(model: TrainableModel, folder: Path, with_mtp: bool) -> None:
    """Raise ModelError unless the folder's tensors are those that its config.json describes; reads headers alone."""
    with HfCheckpoint(folder) as files:
        table = weight_table(files.as_stored(model), padded_vocab_size=model.vocab_size, with_mtp=with_mtp)
        files.check(table, unloaded_prefixes(model, with_mtp))
