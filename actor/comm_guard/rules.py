"""Which collectives are probed before they run. A policy is a YAML file; the first rule that fits a call decides."""

from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from actor.collectives.operations import OPERATIONS, SIZE_CLASSES
from rlpipe.config.base import Section
from rlpipe.config.strict_yaml import StrictYamlError, dump_yaml, load_yaml
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.regular_file import read_regular

DEFAULT_RULES = Path(__file__).with_name("default_rules.yaml")

Verdict = Literal["skip", "guard"]


class Stack(Section):
    """What the evidence of a policy was measured on."""

    device: str
    driver: str
    nccl: str
    torch: str

    def differences(self, other: "Stack") -> list[str]:
        """One phrase for each part that differs, this policy's value first."""
        pairs = zip(self, other, strict=True)
        return [f"{name} {mine!r} (here {theirs!r})" for (name, mine), (_, theirs) in pairs if mine != theirs]


class Threshold(Section):
    """Free driver memory below which a guarded call is preceded by a clean-up: exactly one of the two."""

    share: float | None = Field(None, gt=0, lt=1)
    """Of the device's memory."""

    size_bytes: int | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.share is None) == (self.size_bytes is None):
            raise ValueError("a threshold has either `share` or `size_bytes`")
        return self

    def in_bytes(self, total_bytes: int) -> int:
        return self.size_bytes if self.size_bytes is not None else int((self.share or 0) * total_bytes)


class Rule(Section):
    """The verdict on calls of one operation."""

    operation: Literal[OPERATIONS]  # type: ignore[valid-type]

    names: list[str] = Field(default_factory=list)
    """What published evidence calls it."""

    groups: list[str] | None = None
    """Descriptions of process groups that it holds for; all when empty."""

    sizes: list[Literal[SIZE_CLASSES]] | None = None  # type: ignore[valid-type]
    """Size classes of the larger side of the message that it holds for; all when empty."""

    verdict: Verdict
    evidence: str

    def fits(self, operation: str, group: str, size: str) -> bool:
        return (
            self.operation == operation
            and (self.groups is None or group in self.groups)
            and (self.sizes is None or size in self.sizes)
        )


class Policy(Section):
    """Rules, and what holds for calls that no rule fits."""

    stack: Stack | None = None
    """Where it was measured; empty for published evidence."""

    threshold: Threshold = Threshold(share=0.04)
    guard_first_use: bool = True
    """Probe the first call of each operation, group and size class whatever the verdict: NCCL sets up buffers then."""

    default: Verdict = "guard"
    rules: list[Rule] = Field(default_factory=list)

    def verdict(self, operation: str, group: str, size: str) -> Verdict:
        """group: its description. size: one of SIZE_CLASSES."""
        found = (rule.verdict for rule in self._rules_of.get(operation, []) if rule.fits(operation, group, size))
        return next(found, self.default)

    def skips_all_sizes(self, operation: str, group: str) -> bool:
        return all(self.verdict(operation, group, size) == "skip" for size in SIZE_CLASSES)

    @cached_property
    def _rules_of(self) -> dict[str, list[Rule]]:
        rules: dict[str, list[Rule]] = {}
        for rule in self.rules:
            rules.setdefault(rule.operation, []).append(rule)
        return rules


def load_policy(path: Path = DEFAULT_RULES) -> Policy:
    """Raises ConfigError naming the file and what is wrong in it."""
    try:
        return Policy.model_validate(load_yaml(read_regular(path).decode()))
    except OSError as error:
        raise ConfigError(f"{path}: the policy cannot be read ({error.strerror}); give the path of a policy") from None
    except (StrictYamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the policy cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}: {place}: {first['msg']}; correct it or make the policy again") from None


def save_policy(policy: Policy, path: Path) -> None:
    tree = policy.model_dump(exclude_none=True, exclude_defaults=False)
    path.write_text(dump_yaml(tree))


def policy_table(policy: Policy) -> str:
    """The rules as text: operation, where it holds, verdict and evidence."""
    made = "published evidence, no stack of its own"
    if policy.stack is not None:
        made = ", ".join(f"{name} {value}" for name, value in policy.stack)
    limit = policy.threshold
    below = f"{limit.share:.1%} of the device" if limit.share else f"{(limit.size_bytes or 0) / 2**30:.2f} GiB"
    head = [
        f"made on: {made}",
        f"clean-up below {below} free; first use {'guarded' if policy.guard_first_use else 'not guarded'}; "
        f"operations without a rule: {policy.default}",
        f"{'operation':<34} {'verdict':<7} {'holds for':<28} evidence",
    ]
    return "\n".join([*head, *(_row(rule) for rule in policy.rules)])


def _row(rule: Rule) -> str:
    parts = [", ".join(rule.groups)] if rule.groups else []
    parts += [f"sizes {', '.join(rule.sizes)}"] if rule.sizes else []
    where = "; ".join(parts) or "all calls"
    return f"{rule.operation:<34} {rule.verdict:<7} {where:<28} {' '.join(rule.evidence.split())}"
