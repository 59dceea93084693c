"""What a command printed when it was recorded: benchmarks/results/NAME.DEVICE.json, written by benchmarks/record.py."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import DataError


@dataclass(frozen=True)
class Record:
    """What one command printed, and where.

    commit: of the checkout, with a "+" where files had changed since.
    code: card -> digest of the code that it names, as it was then (rlpipe/commands/cards/code_digest.py).
    calibration_seconds: of fixed work in the same process, None where there was none.
    """

    name: str
    command: str
    date: str
    host: str
    versions: dict[str, str]
    output: str
    commit: str = ""
    code: dict[str, str] = field(default_factory=dict)
    calibration_seconds: float | None = None

    @property
    def device(self) -> str:
        """Short name of what the host computes on: cpu, cuda, or cuda2 for two GPUs."""
        found = re.search(r"(\d+) x GPU", self.host)
        if found is None:
            return "cpu"
        return "cuda" if found[1] == "1" else f"cuda{found[1]}"

    @property
    def stem(self) -> str:
        """What cards call it: the name of its file without .json."""
        return f"{self.name}.{self.device}"


def read_record(file: Path) -> Record:
    """Raises DataError for a file that is none."""
    try:
        return Record(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        raise DataError(f"{file}: there is no such record; make it with python benchmarks/record.py") from None
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is no record of benchmarks/record.py: {error}") from None


def write_record(record: Record, folder: Path) -> Path:
    """The file, which replaces an older record of the same command and kind of machine."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{record.stem}.json"
    write_atomically(file, (json.dumps(asdict(record), indent=1) + "\n").encode())
    return file
