"""What an engine tells SGLang's scheduler processes of a weight update, and what they answer, in the fields that
SGLang's requests have: lists of names, types and shapes there, one text back."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from rlpipe.shared.weights import TensorSpec, WeightBucket, WeightGroup


def group_text(group: WeightGroup) -> str:
    """`group` without its key: the engine's own process has passed the gate by then."""
    return json.dumps({name: value for name, value in vars(group).items() if name != "key"})


def group_of(text: str) -> WeightGroup:
    """From `group_text`."""
    fields = json.loads(text)
    return WeightGroup(**fields | {name: tuple(fields[name]) for name in ("addresses", "senders")})


def plan_fields(plan: Sequence[WeightBucket]) -> tuple[list[str], list[str], list[list[int]]]:
    """`plan` as names, types and shapes of all tensors; before the shapes stand how many tensors each bucket has, and
    its sender."""
    tensors = [tensor for bucket in plan for tensor in bucket.tensors]
    of_buckets = [[len(bucket.tensors) for bucket in plan], [bucket.sender for bucket in plan]]
    return (
        [tensor.name for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [*of_buckets, *(list(tensor.shape) for tensor in tensors)],
    )


def plan_of(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[WeightBucket, ...]:
    """From `plan_fields`."""
    counts, senders, *others = shapes
    rows = iter(zip(names, dtypes, others, strict=True))
    return tuple(
        WeightBucket(tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in islice(rows, count)), sender)
        for count, sender in zip(counts, senders, strict=True)
    )


@dataclass(frozen=True)
class RankAnswer:
    """Of one tensor-parallel rank. checksums: of the buckets that it received, where they are asked for. failure: why
    it could not go on, empty where it could."""

    checksums: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Answer:
    """Of all tensor-parallel ranks of an engine, in order."""

    ranks: tuple[RankAnswer, ...]

    @classmethod
    def of_text(cls, text: str) -> "Answer":
        """From `text`; SGLang itself may have refused the request, in words of its own."""
        try:
            rows = json.loads(text)
            return cls(tuple(RankAnswer(tuple(row["checksums"]), row["failure"]) for row in rows))
        except (ValueError, TypeError, KeyError):
            return cls((RankAnswer(failure=text or "SGLang gave no reason"),))

    def as_text(self) -> str:
        return json.dumps([asdict(rank) for rank in self.ranks])

    @property
    def failure(self) -> str:
        """Why a rank failed, with the rank where there are several; empty where none did."""
        failed = [(number, rank.failure) for number, rank in enumerate(self.ranks) if rank.failure]
        return "; ".join(text if len(self.ranks) == 1 else f"rank {number}: {text}" for number, text in failed)

    @property
    def disagreement(self) -> str:
        """The first bucket that ranks received different bytes of; empty where there is none."""
        for bucket, sums in enumerate(zip(*(rank.checksums for rank in self.ranks), strict=True)):
            if len(set(sums)) > 1:
                received = ", ".join(f"rank {number} {one}" for number, one in enumerate(sums))
                return f"its tensor-parallel ranks received different bytes of bucket {bucket} (CRC-32: {received})"
        return ""

    @property
    def checksums(self) -> tuple[str, ...]:
        """Of all ranks, which agree."""
        return self.ranks[0].checksums if self.ranks else ()
