"""What profiles saw, and the policy that follows from it. Pure: imports no torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actor.collectives.operations import SIZE_CLASSES
from actor.comm_guard.rules import Policy, Rule, Stack, Threshold, Verdict
from rlpipe.shared.errors import ResourceError


@dataclass(frozen=True)
class Observation:
    """Calls of one operation, group and size class. Drops are falls of free driver memory over one call, with what
    PyTorch's pool took; `later_drop_bytes` is the largest but for the first call's. `allocated_bytes` and
    `reserved_bytes`: largest growth of PyTorch's pool over one call. `probe_seconds`: mean of one reading."""

    operation: str
    group: str
    size: str
    ranks: int
    calls: int
    first_drop_bytes: int
    later_drop_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    probe_seconds: float

    def joined(self, other: "Observation") -> "Observation":
        """The worse of two ranks. Calls are those of the busier rank."""
        larger = {
            name: max(getattr(self, name), getattr(other, name))
            for name in asdict(self)
            if name not in ("operation", "group", "size")
        }
        return replace(self, **larger)

    def verdict(self, tolerance_bytes: int) -> Verdict:
        """`guard` for what takes memory in later calls, or was never called again."""
        return "skip" if self.calls > 1 and self.later_drop_bytes <= tolerance_bytes else "guard"

    @property
    def signal(self) -> str:
        """The key signal, in words."""
        return (
            f"{self.calls} calls; driver memory fell by {_mebibytes(self.first_drop_bytes)} in the first and at most "
            f"{_mebibytes(self.later_drop_bytes)} in a later one; PyTorch's pool grew by at most "
            f"{_mebibytes(self.reserved_bytes)}, tensors by {_mebibytes(self.allocated_bytes)}"
        )


@dataclass(frozen=True)
class Evidence:
    """What one rank, or several joined, saw on one stack. `clean_up_seconds`: of one clean-up after the last
    call, 0 where there was none."""

    stack: Stack
    total_bytes: int
    clean_up_seconds: float
    observations: tuple[Observation, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(replace(self, stack=None)) | {"stack": self.stack.model_dump()}  # type: ignore[arg-type]

    @classmethod
    def of_json(cls, tree: dict[str, Any]) -> "Evidence":
        observations = tuple(Observation(**row) for row in tree["observations"])
        return cls(Stack(**tree["stack"]), tree["total_bytes"], tree["clean_up_seconds"], observations)


def read_evidence(folder: Path) -> Evidence:
    """The ranks' files, joined. Raises ResourceError if there is none, or if ranks ran on different stacks."""
    ranks = [Evidence.of_json(json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.json"))]
    if not ranks:
        raise ResourceError(
            f"no collective used a device's communicator, so {folder} holds no evidence: profile where the actor has "
            "several GPUs; collectives of the CPU are never guarded"
        )
    for other in ranks[1:]:
        if different := ranks[0].stack.differences(other.stack):
            raise ResourceError(
                f"ranks ran on different stacks, {'; '.join(different)}: profile on nodes that are alike"
            )
    joined: dict[tuple[str, str, str], Observation] = {}
    for seen in (seen for rank in ranks for seen in rank.observations):
        key = (seen.operation, seen.group, seen.size)
        joined[key] = joined[key].joined(seen) if key in joined else seen
    clean_up_seconds = max(rank.clean_up_seconds for rank in ranks)
    return Evidence(ranks[0].stack, min(rank.total_bytes for rank in ranks), clean_up_seconds, _sorted(joined.values()))


def policy_of(evidence: Evidence, tolerance_bytes: int, threshold: Threshold) -> Policy:
    """Rules with their evidence: one for each guarded group and size class, then one for the rest of an operation."""
    rules: list[Rule] = []
    operations = dict.fromkeys(seen.operation for seen in evidence.observations)
    for operation in operations:
        seen = [one for one in evidence.observations if one.operation == operation]
        rules += _rules(operation, seen, tolerance_bytes)
    return Policy(stack=evidence.stack, threshold=threshold, guard_first_use=True, default="guard", rules=rules)


def evidence_table(evidence: Evidence, tolerance_bytes: int) -> str:
    """A row for each operation, group and size class: where, key signal, verdict."""
    rows = [
        (f"{seen.operation} {seen.size}", f"{seen.group} ({seen.ranks})", seen.verdict(tolerance_bytes), seen.signal)
        for seen in evidence.observations
    ]
    probe = max((seen.probe_seconds for seen in evidence.observations), default=0.0)
    lines = [f"{where:<40} {group:<44} {verdict:<7} {signal}" for where, group, verdict, signal in rows]
    head = f"{'operation, size class':<40} {'group (ranks)':<44} {'verdict':<7} key signal"
    cost = f"a probe took up to {probe * 1e3:.3f} ms, a clean-up {evidence.clean_up_seconds * 1e3:.1f} ms"
    return "\n".join([head, *lines, cost])


def _rules(operation: str, seen: Sequence[Observation], tolerance_bytes: int) -> list[Rule]:
    guarded = [one for one in seen if one.verdict(tolerance_bytes) == "guard"]
    skipped = [one for one in seen if one.verdict(tolerance_bytes) == "skip"]
    rules = [
        Rule(operation=operation, groups=[one.group], sizes=[one.size], verdict="guard", evidence=one.signal)
        for one in guarded
    ]
    if skipped:
        worst = max(skipped, key=lambda one: one.later_drop_bytes)
        calls = sum(one.calls for one in skipped)
        signal = f"{calls} calls in all; the worst, {worst.size} in {worst.group}: {worst.signal}"
        rules.append(Rule(operation=operation, verdict="skip", evidence=signal))
    return rules


def _sorted(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    return tuple(sorted(observations, key=lambda one: (one.operation, one.group, SIZE_CLASSES.index(one.size))))


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.2f} MiB"
