"""What a saved policy tells of itself: its model card, and the same for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

_FACTS = "rlpipe.json"


def is_saved_policy(folder: Path) -> bool:
    """Whether `PolicyFacts.write` was called for it: it is nobody else's folder."""
    return (folder / _FACTS).is_file() and not folder.is_symlink()


@dataclass(frozen=True)
class PolicyFacts:
    """Run and iteration that a policy comes from; `metrics` are of its evaluation, empty where there was none."""

    run: str
    iteration: int
    metrics: dict[str, float]
    card: str

    def write(self, folder: Path) -> None:
        """README.md, the model card, and rlpipe.json."""
        (folder / "README.md").write_text(self.card, encoding="utf-8")
        values = {key: value for key, value in asdict(self).items() if key != "card"}
        (folder / _FACTS).write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "PolicyFacts | None":
        """Of a folder that `write` was called for; None where there is none."""
        if not (folder / _FACTS).exists():
            return None
        return cls(**json.loads((folder / _FACTS).read_text()), card=(folder / "README.md").read_text(encoding="utf-8"))
