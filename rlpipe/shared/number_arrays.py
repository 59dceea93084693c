"""Tuples of numbers in the memory of arrays: what is kept of every token of a rollout.

A million responses of thousands of tokens stay in one process. A tuple takes 8 bytes for each entry, another 24 for
each float, and a Python operation for each entry that is looked at; these take the bytes of their type and numpy's
time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", int, float)


class NumberArray(Sequence[Number], Generic[Number]):
    """Never changes. Compares, adds and slices as a tuple does, also with tuples; its entries are Python numbers.

    `array`: one-dimensional, contiguous, read-only, of `dtype`. `content`: its memory, as an array or bytes. A slice
    shares it. Pickled it is its bytes, so that what a
    process receives is its own copy and no part of Ray's object store.
    """

    __slots__ = ("array", "content")
    dtype: ClassVar[np.dtype[Any]]
    kinds: ClassVar[str]
    """Kinds of numpy's types that it can be made of."""

    def __init__(self, values: "Iterable[Number] | NDArray[Any]" = ()) -> None:
        """Raises ValueError for values of another kind, or beyond the range of its type."""
        found = np.asarray(values if isinstance(values, np.ndarray | NumberArray) else list(values))
        if found.ndim != 1 or (found.size and found.dtype.kind not in self.kinds):
            raise ValueError(f"{type(self).__name__} cannot be made of an array of {found.ndim} axes of {found.dtype}")
        with np.errstate(over="ignore"):  # a log-probability beyond float32 is infinite, which those who check see
            array = found.astype(self.dtype)
        if array.dtype.kind in "iu" and not np.array_equal(array, found):
            raise ValueError(f"{type(self).__name__} cannot hold {found.max()}: it has {8 * array.itemsize} bits")
        self._take(array)

    @classmethod
    def of(cls, values: "Iterable[Number] | NumberArray[Number]") -> Self:
        """`values` itself where it is one already."""
        return values if isinstance(values, cls) else cls(values)

    @classmethod
    def filled(cls, value: Number, count: int) -> Self:
        """`count` times `value`."""
        return cls._around(np.full(count, value, cls.dtype))

    @classmethod
    def _around(cls, array: NDArray[Any]) -> Self:
        made = cls.__new__(cls)
        made._take(array)
        return made

    def _take(self, array: NDArray[Any]) -> None:
        array.flags.writeable = False
        self.array = array
        self.content: Any = array

    def __reduce__(self) -> tuple[Any, ...]:
        # Not a method: Ray's pickler would write its code, which takes eight times as long as the numbers.
        return _of_bytes, (type(self), bytes(self.content))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype, copy=copy) if copy else np.asarray(self.array, dtype)

    def __len__(self) -> int:
        return self.array.size

    def __iter__(self) -> Iterator[Number]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, index: SupportsIndex) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Number | Self":
        if isinstance(index, slice):
            return self._around(np.ascontiguousarray(self.array[index]))
        entry: Number = self.array[index].item()
        return entry

    def __add__(self, other: Iterable[Number]) -> Self:
        return self._joined(self, other)

    def __radd__(self, other: Iterable[Number]) -> Self:
        return self._joined(other, self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, NumberArray):
            return type(self) is type(other) and np.array_equal(self.array, other.array)
        if not isinstance(other, tuple):
            return NotImplemented
        return len(other) == len(self) and (not other or np.array_equal(self.array, np.array(other)))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self)})"

    @classmethod
    def _joined(cls, first: Iterable[Number], second: Iterable[Number]) -> Self:
        if first == () or second == ():
            return cls.of(first if second == () else second)
        return cls._around(np.concatenate((cls.of(first).array, cls.of(second).array)))


def _of_bytes(kind: type[NumberArray[Any]], content: bytes) -> NumberArray[Any]:
    made = kind._around(np.frombuffer(content, kind.dtype))
    made.content = content
    return made


class TokenIds(NumberArray[int]):
    """Ids of consecutive tokens: int32."""

    __slots__ = ()
    dtype = np.dtype(np.int32)
    kinds = "iu"


class Logprobs(NumberArray[float]):
    """Natural logarithms, one for each token: float32, as engines compute them and as losses take them."""

    __slots__ = ()
    dtype = np.dtype(np.float32)
    kinds = "fiu"


class LossMask(NumberArray[int]):
    """1 for each token that is trained, and 0 for others: int8."""

    __slots__ = ("_ones",)
    _ones: int
    dtype = np.dtype(np.int8)
    kinds = "iub"

    @property
    def ones(self) -> int:
        """How many there are; looked for once."""
        found: int | None = getattr(self, "_ones", None)
        if found is None:
            found = self._ones = int(np.count_nonzero(self.array.view(np.bool_)))
        return found


Tokens = tuple[int, ...] | TokenIds
TokenLogprobs = tuple[float, ...] | Logprobs
Mask = tuple[int, ...] | LossMask
