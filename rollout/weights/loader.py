"""Loads tensors into the engine's model; SGLang's loader is asked only once for most of them.

It takes experts one by one and costs tens of microseconds a tensor and milliseconds a call, far more than copying the
bytes. What it does with a tensor is nearly always to copy it, or this rank's part of it, into parameters: these copies
are watched the first time, and later repeated for a whole bucket in a few launches. A tensor goes through the loader
every time if it is used in any other way, or if something is made of the parameters that it is copied into.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlpipe.shared.errors import RolloutError
from rlpipe.shared.replaced_parts import relies_on
from rlpipe.shared.weights import StackedExperts

relies_on(
    "torch._C._VariableFunctions:_foreach_copy_",
    why="one launch for many small tensors",
    drop_when="torch names it without an underscore",
)
relies_on(
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_leaves",
    why="what SGLang's loader does with a tensor is watched once, and repeated where it only copies",
    drop_when="torch has them in a public module, or SGLang loads as fast",
)

_WRITES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar})

_SMALL_BYTES = 2**20

Tensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Copy:
    """`target` is a view of a parameter; `offset`, `size` and `stride` in elements place its source in a tensor."""

    target: torch.Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def parameter(self) -> int:
        """Address of the memory that `target` is a part of."""
        return self.target.untyped_storage().data_ptr()

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class WeightLoader:
    """Keeps what it has seen SGLang's loader do, for as long as the model keeps its parameters in place."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Copy, ...]] = {}
        self._seen: set[str] = set()
        self._read: set[int] = set()
        self._postponed: list[tuple[str, torch.Tensor]] = []

    @torch.no_grad()
    def load(self, model: Any, tensors: Tensors) -> None:
        """The tensors of a bucket; small ones may wait for `finish`.

        tensors: contiguous, by Hugging Face name; a layer's experts one by one, or stacked as
        [experts, rows, columns].
        """
        pairs, by_loader, new = [], [], []
        for name, tensor in tensors:
            if name in self._copies:
                pairs += [(copy.target, copy.source(tensor)) for copy in self._copies[name]]
            elif name not in self._seen:
                new.append((name, tensor))
            elif tensor.nbytes <= _SMALL_BYTES:
                self._postponed.append((name, tensor.clone()))
            else:
                by_loader.append((name, tensor))
        _copy_all(pairs)
        _load(model, by_loader)
        if new:
            self._learn(model, new)

    @torch.no_grad()
    def finish(self, model: Any) -> None:
        """Call after the last bucket."""
        _load(model, self._postponed)
        self._postponed = []

    def _learn(self, model: Any, tensors: Tensors) -> None:
        with _Watch(model, tensors) as watch:
            _load(model, tensors)
        self._seen.update(name for name, _ in tensors)
        self._read |= watch.read
        found = self._copies | watch.learnt()
        self._copies = {
            name: copies for name, copies in found.items() if not any(copy.parameter in self._read for copy in copies)
        }


def _load(model: Any, tensors: Tensors) -> None:
    if tensors:
        model.load_weights([single for name, tensor in tensors for single in one_by_one(name, tensor)])


class _Watch(TorchDispatchMode):
    """Sees every operation of a loader, and what it does with the given tensors.

    read: addresses of the parameters that something was made of.
    """

    def __init__(self, model: Any, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        self._starts, self._names = zip(*sorted((tensor.data_ptr(), name) for name, tensor in tensors), strict=True)
        kept = (*model.parameters(), *model.buffers())
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._used_otherwise: set[str] = set()
        self.read: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if not function.is_view and not self._is_copy(function, arguments):
            read = tree_leaves((arguments[1:] if function in _WRITES else arguments, keywords))
            for tensor in read:
                if isinstance(tensor, torch.Tensor):
                    self._note_use(tensor)
        return result

    def learnt(self) -> Mapping[str, tuple[Copy, ...]]:
        """Of each tensor that was only copied: copies that put everything where it now is."""
        names = [name for name in self._seen if name not in self._used_otherwise]
        found = {name: _merged(self._tensors[name], self._seen[name]) for name in names}
        return {name: copies for name, copies in found.items() if self._are_true(name, copies)}

    def _is_copy(self, function: Any, arguments: Any) -> bool:
        """Whether this copies one of the tensors into a parameter; remembers it then."""
        if function is not torch.ops.aten.copy_.default:
            return False
        target, source = arguments[:2]
        name = self._name_of(source)
        if name is None or target.shape != source.shape or not self._is_kept(target):
            return False
        if target.dtype == torch.float8_e4m3fn != source.dtype:
            raise RolloutError(
                f"{name!r} came in {source.dtype} for a parameter that the engine keeps in 8 bits, where it would lack "
                "its scales: set rollout.engine.quantization to 'none', and report the model's family"
            )
        self._seen.setdefault(name, []).append((target, source))
        return True

    def _note_use(self, tensor: torch.Tensor) -> None:
        name = self._name_of(tensor)
        if name is not None:
            self._used_otherwise.add(name)
        if self._is_kept(tensor):
            self.read.add(tensor.untyped_storage().data_ptr())

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._kept

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        """The tensor among the given ones that this is a part of."""
        address = tensor.data_ptr()
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        name: str = self._names[place]
        whole = self._tensors[name]
        inside = address < whole.data_ptr() + whole.nbytes and tensor.device == whole.device
        return name if inside else None

    def _are_true(self, name: str, copies: Sequence[Copy]) -> bool:
        tensor = self._tensors[name]
        return all(
            torch.equal(_comparable(copy.target), _comparable(copy.source(tensor).to(copy.target.dtype)))
            for copy in copies
        )


def one_by_one(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor as SGLang's loaders take it: experts apart, gate and up apart."""
    stacked = StackedExperts.of_name(name)
    if stacked is None:
        yield name, tensor
        return
    weight = f"weight{stacked.ending}"
    for index, expert in enumerate(tensor, stacked.first):
        if stacked.kind == "down_proj":
            yield f"{stacked.root}.{index}.down_proj.{weight}", expert
            continue
        gate, up = expert.chunk(2)
        yield f"{stacked.root}.{index}.gate_proj.{weight}", gate
        yield f"{stacked.root}.{index}.up_proj.{weight}", up


def _merged(tensor: torch.Tensor, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Copy, ...]:
    """Neighbours on both sides become one: all experts of a layer, where the engine keeps them as they come."""
    runs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for pair in copies:
        if runs and all(_follows(before, after) for before, after in zip(runs[-1][-1], pair, strict=True)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return tuple(_as_copy(tensor, run) for run in runs)


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    return (
        before.is_contiguous()
        and after.is_contiguous()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.data_ptr() + before.nbytes == after.data_ptr()
    )


def _as_copy(tensor: torch.Tensor, run: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
    target, source = run[0]
    offset = int(source.storage_offset()) - int(tensor.storage_offset())
    if len(run) == 1:
        return Copy(target, offset, tuple(source.shape), tuple(source.stride()))
    elements = sum(one.numel() for one, _ in run)
    return Copy(target.as_strided((elements,), (1,), target.storage_offset()), offset, (elements,), (1,))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: torch compares and copies it in no other way in one launch."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """One launch for many tensors of one data type; those that are converted go one by one."""
    alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
    if alike:
        torch._foreach_copy_([_comparable(target) for target, _ in alike], [_comparable(source) for _, source in alike])
    for target, source in pairs:
        if target.dtype != source.dtype:
            target.copy_(source)
