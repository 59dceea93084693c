"""Rows rendered and tokenized by several processes, once, and kept in files that are memory-mapped.

Small data sets stay in memory and leave nothing behind. What is kept has the name of a fingerprint: of the files'
names, sizes and times, the data set's settings, the tokenizer, the limits, this package's code, and the encoder's own.
"""

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.config.data import DatasetConfig
from rlpipe.data.chat_messages import template_tools
from rlpipe.data.chat_template import ChatShown
from rlpipe.data.row_files import identity_of
from rlpipe.data.row_source import RowSource, open_rows, slice_of
from rlpipe.data.rows import Row, bad_row, checked
from rlpipe.data.special_text import SpecialText
from rlpipe.shared.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SMALL_ROWS = 5_000  # below that, processes and files cost more than they save
_BATCH_ROWS = 1_000
_INDEX = "index.npz"


@dataclass(frozen=True)
class Preparation:
    """Where prepared rows are kept (in the cache of `datasets` where empty), and by how many processes (all cores)."""

    cache_directory: str | None = None
    processes: int | None = None

    @property
    def cache(self) -> Path:
        if self.cache_directory:
            return Path(self.cache_directory)
        from datasets.config import HF_DATASETS_CACHE

        return Path(HF_DATASETS_CACHE) / "rlpipe"

    @property
    def all_processes(self) -> int:
        return self.processes or len(os.sched_getaffinity(0))


class Status(IntEnum):
    """What became of a row."""

    KEPT = 0
    BAD = 1
    """The row itself is malformed; it has no number."""
    UNRENDERABLE = 2
    """The chat template or a prompt template refuses it."""
    TOO_LONG = 3


@dataclass(frozen=True)
class EncodedRow:
    """What a row becomes, as it is kept. `loss_mask` has an entry for each token of an answer; a prompt has none.

    `metadata`: its columns, as JSON reads them.
    """

    text: str
    token_ids: Sequence[int]
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    loss_mask: Sequence[int] = ()
    prompt_tokens: int = 0
    special_text: bool = False
    too_long: bool = False


@dataclass(frozen=True)
class RowEncoder:
    """How rows of a data set are encoded. Subclasses say how; instances travel to other processes."""

    dataset: DatasetConfig
    tokenizer: "PreTrainedTokenizerBase"
    with_label: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, row: Row) -> Sequence[EncodedRow]:
        """What the row becomes, which may be several. Raises DataError for a row that cannot be rendered."""
        raise NotImplementedError

    @property
    def limits(self) -> Mapping[str, Any]:
        """What else the result depends on, as JSON."""
        return {}

    @cached_property
    def special(self) -> SpecialText:
        return SpecialText(self.tokenizer)

    @property
    def hides(self) -> bool:
        """Whether text of special tokens stays text."""
        return not self.dataset.allow_special_tokens

    def chat_shown(self, row: Row) -> ChatShown:
        """What the chat template is shown beside the row's messages."""
        column = self.dataset.tools_column
        tools = template_tools(row.values[column]) if column else []
        shown: Mapping[str, Any] = self.special.prepared(
            {"tools": tools, "arguments": dict(self.template_arguments)}, row.place, self.hides
        )
        return ChatShown(**shown)


class MappedRows:
    """What became of all rows of a data set, in their order."""

    def __init__(self, table: Any, index: Mapping[str, NDArray[Any]], problems: Sequence[Mapping[str, Any]]) -> None:
        self._table = table
        self._problems = problems
        status, part = index["status"], index["part"]
        first = part == 0
        self.kept: NDArray[np.int64] = np.flatnonzero(status == Status.KEPT)
        self.numbers: NDArray[np.int64] = (np.cumsum((status != Status.BAD) & first) - 1)[self.kept]
        """Of the rows that what is kept was made of, among those that are not malformed."""
        self.parts: NDArray[np.int64] = part[self.kept]
        """Which of the several that its row became is kept; 0 for the first and where there is one."""
        self.digests: NDArray[np.int64] = index["digest"][self.kept]
        """Of the kept texts."""
        self.contents: NDArray[np.int64] = index["content"][self.kept]
        """Digests of all that is trained on."""
        self.count = int(np.count_nonzero(first))
        self.made = len(status)
        """What became of the rows: more than there are where one becomes several."""
        self.malformed = int(np.count_nonzero(status == Status.BAD))
        self.skipped = int(np.count_nonzero((status == Status.BAD) | (status == Status.UNRENDERABLE)))
        self.too_long = int(np.count_nonzero(status == Status.TOO_LONG))
        readable = (status == Status.KEPT) | (status == Status.TOO_LONG)
        self.special_text_rows = int(np.count_nonzero(index["special_text"] & readable & first))

    def row(self, position: int) -> dict[str, Any]:
        """The columns of what is kept at `position`."""
        return dict(self._table[int(self.kept[position])])

    def check(self, skip_bad_rows: bool) -> None:
        """Raise DataError for the first row that cannot be used, unless such rows are skipped."""
        for problem in () if skip_bad_rows else self._problems:
            if problem["status"] == Status.BAD:
                raise bad_row(problem["place"], problem["problem"])
            raise DataError(problem["problem"])

    @property
    def first_problem(self) -> str:
        """Why the first row that is skipped is."""
        if not self._problems:
            return ""
        place, problem, status = (self._problems[0][name] for name in ("place", "problem", "status"))
        return str(problem) if status == Status.UNRENDERABLE else f"{place}: {problem}"  # the former names its place


@dataclass(frozen=True)
class RowCounts:
    """What became of all rows of some data sets.

    `made`: what they became, of which `too_long` are. `first_problem`: why the first row that is skipped is.
    `special_text`: rows that hold text of special tokens, which stays text.
    """

    rows: int
    made: int
    too_long: int
    skipped: int
    special_text: int
    first_problem: str

    @classmethod
    def of(cls, parts: Sequence[tuple[DatasetConfig, MappedRows]]) -> "RowCounts":
        found = [rows for _, rows in parts]
        return cls(
            sum(rows.count for rows in found),
            sum(rows.made for rows in found),
            sum(rows.too_long for rows in found),
            sum(rows.skipped for rows in found),
            sum(rows.special_text_rows for rows in found),
            next((rows.first_problem for rows in found if rows.first_problem), ""),
        )

    def notes(self, name: str) -> Iterator[str]:
        """A sentence for each thing that the reader of the run should know of the rows of `name`."""
        rows = f"{self.rows} rows"
        if self.made > self.rows:
            rows = f"{self.made} sequences"
            yield (
                f"{name}: {self.rows} rows become {rows}, because the chat template writes earlier turns otherwise "
                "than the last one"
            )
        if self.too_long or self.skipped:
            first = f", the first of those for: {self.first_problem}" if self.first_problem else ""
            yield f"{name}: of {rows} {self.too_long} are too long and {self.skipped} are skipped{first}"
        if self.special_text:
            yield (
                f"{name}: {self.special_text} rows hold text of special tokens, which stays text (allow_special_tokens "
                "makes tokens of it)"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """For every iteration."""
        return {
            "data/prompts_too_long": float(self.too_long),
            "data/rows_skipped": float(self.skipped),
            "data/special_text_rows": float(self.special_text),
        }


def fingerprint_of(parts: Sequence[tuple[DatasetConfig, MappedRows]]) -> str:
    """Changes with any token, mask, label or number of the kept rows, and with their order."""
    digest = hashlib.blake2b(digest_size=8)
    for dataset, rows in parts:
        digest.update(f"{dataset.name} {len(rows.kept)}\n".encode())
        digest.update(rows.numbers.tobytes())
        if rows.parts.any():
            digest.update(rows.parts.tobytes())
        digest.update(rows.contents.tobytes())
    return digest.hexdigest()


def map_rows(encoder: RowEncoder, preparation: Preparation) -> MappedRows:
    """All rows of the encoder's data set, from the cache where they are there already.

    Raises DataError where the data set cannot be read.
    """
    identity = identity_of(encoder.dataset)
    source = None
    if identity is None:
        source = open_rows(encoder.dataset)  # the cache of `datasets` tells whether the hub's set is the same
        identity = [encoder.dataset.path, encoder.dataset.split, source.fingerprint]  # type: ignore[attr-defined]
    folder = preparation.cache / _fingerprint(encoder, identity)
    if not (folder / _INDEX).exists():
        source = source or open_rows(encoder.dataset)
        selected = range(len(source))[slice_of(encoder.dataset)]
        mapper = _Mapper(source, encoder)
        if len(selected) < _SMALL_ROWS:
            return _in_memory(mapper, selected)
        _write(mapper, selected, folder, preparation.all_processes)
    return _read(folder)


class _Mapper:
    """Encodes a batch of rows. The columns are those of `_features`."""

    def __init__(self, source: RowSource, encoder: RowEncoder) -> None:
        self._source = source
        self._encoder = encoder

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        rows = self._source.read(batch["row"])
        encoder = self._encoder
        encoded = [kept for one in checked(rows, encoder.dataset, encoder.with_label) for kept in self._of_row(*one)]
        return {name: [one[name] for one in encoded] for name in _COLUMNS}

    def _of_row(self, place: str, values: Any, problem: str | None) -> list[dict[str, Any]]:
        if problem is not None:
            return [_dropped(Status.BAD, place, problem)]
        try:
            made = self._encoder.encode(Row(place, values))
            return [_kept(one, place, number) for number, one in enumerate(made)]
        except DataError as error:
            return [_dropped(Status.UNRENDERABLE, place, str(error))]
        except UnicodeEncodeError:
            problem = f"{place}: the text holds half of a surrogate pair; remove it"
            return [_dropped(Status.UNRENDERABLE, place, problem)]


def _kept(row: EncodedRow, place: str, part: int) -> dict[str, Any]:
    text, label = row.text.encode(), row.label.encode()
    kept = vars(row) | {"metadata": json.dumps(row.metadata, default=str), "place": place, "problem": "", "part": part}
    kept["status"] = Status.TOO_LONG if kept.pop("too_long") else Status.KEPT
    tokens, mask = np.asarray(row.token_ids, np.int32), np.asarray(row.loss_mask, np.int8)
    content = b"\0".join((tokens.tobytes(), mask.tobytes(), label))
    return kept | {"digest": _digest(text), "content": _digest(content)}


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _dropped(status: Status, place: str, problem: str) -> dict[str, Any]:
    empty = dict(vars(EncodedRow("", ())))
    del empty["too_long"]
    told = {"metadata": "{}", "status": status, "digest": 0, "content": 0, "place": place, "problem": problem}
    return empty | told | {"part": 0}


_COLUMNS = {
    "text": "large_string",
    "token_ids": "int32",
    "label": "large_string",
    "metadata": "large_string",
    "loss_mask": "int8",
    "prompt_tokens": "int32",
    "special_text": "bool",
    "status": "int8",
    "part": "int32",
    "digest": "int64",
    "content": "int64",
    "place": "large_string",
    "problem": "large_string",
}
_LISTS = ("token_ids", "loss_mask")
_INDEX_COLUMNS = ("status", "part", "digest", "content", "special_text")


def _features() -> Any:
    from datasets import Features, List, Value

    return Features({name: List(Value(kind)) if name in _LISTS else Value(kind) for name, kind in _COLUMNS.items()})


def _in_memory(mapper: _Mapper, selected: Sequence[int]) -> MappedRows:
    from datasets import Dataset

    table = Dataset.from_dict(mapper({"row": list(selected)}), features=_features())
    return MappedRows(table, _index_of(table), _problems_of(table))


def _write(mapper: _Mapper, selected: Sequence[int], folder: Path, processes: int) -> None:
    """Map in `processes`, then give the folder its name in one rename; another run may do the same beside this one."""
    from datasets import Dataset

    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{partial.parent}: prepared rows cannot be kept here ({error.strerror}); set data.cache_directory"
        ) from None
    rows = Dataset.from_dict({"row": np.arange(selected.start, selected.stop, selected.step)})  # type: ignore[attr-defined]
    table = rows.map(
        mapper,
        batched=True,
        batch_size=_BATCH_ROWS,
        num_proc=min(processes, len(selected) // _BATCH_ROWS),
        remove_columns=["row"],
        features=_features(),
        cache_file_name=str(partial / "rows.arrow"),
        load_from_cache_file=False,
        new_fingerprint=folder.name,
    )
    index: dict[str, Any] = _index_of(table)
    np.savez(partial / _INDEX, **index)
    files = [Path(file["filename"]).name for file in table.cache_files]
    (partial / "files.json").write_text(json.dumps({"files": files, "problems": _problems_of(table)}))
    try:
        partial.rename(folder)
    except OSError:  # it is there already
        shutil.rmtree(partial)


def _read(folder: Path) -> MappedRows:
    from datasets import Dataset, concatenate_datasets

    kept = json.loads((folder / "files.json").read_text())
    table = concatenate_datasets([Dataset.from_file(str(folder / file)) for file in kept["files"]])
    with np.load(folder / _INDEX) as index:
        return MappedRows(table, dict(index), kept["problems"])


def _index_of(table: Any) -> dict[str, NDArray[Any]]:
    """What the driver asks of all rows: small, so it is kept apart from them."""
    return {name: table.data.column(name).to_numpy() for name in _INDEX_COLUMNS}


def _problems_of(table: Any) -> list[dict[str, Any]]:
    """The first row that cannot be used."""
    status = table.data.column("status").to_numpy()
    found = np.flatnonzero((status == Status.BAD) | (status == Status.UNRENDERABLE))[:1]
    return [{name: table[int(row)][name] for name in ("status", "place", "problem")} for row in found]


def _fingerprint(encoder: RowEncoder, identity: Sequence[str]) -> str:
    tokenizer = encoder.tokenizer
    own = Path(inspect.getfile(type(encoder)))
    code = [path.read_text() for path in (*sorted(Path(__file__).parent.glob("*.py")), own)]
    parts = [
        type(encoder).__name__,
        encoder.dataset.model_dump_json(),
        json.dumps(encoder.limits),
        json.dumps(encoder.template_arguments),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items())),
        repr((tokenizer.chat_template, tokenizer.eos_token_id, sorted(tokenizer.special_tokens_map.items()))),
        *identity,
        *code,
    ]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]
