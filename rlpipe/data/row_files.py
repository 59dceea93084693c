"""Which files a data set consists of, and how to tell that they are the same as before."""

import re
from pathlib import Path

from rlpipe.config.data import DatasetConfig
from rlpipe.shared.errors import DataError
from rlpipe.shared.strict_json import StrictJsonError, parse_json

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SPLIT_FILE = re.compile(r"(train|training|test|testing|val|valid|validation|dev|eval|evaluation)(?=$|[-_.\d])")


def files_of(dataset: DatasetConfig) -> list[Path] | None:
    """The files of a data set, in order; None for one of the hub. Raises DataError where there are none."""
    path = Path(dataset.path)
    try:
        if path.is_dir():
            folder = path / (dataset.subset or "")
            return _saved_files(folder, dataset.split) or _files_of_split(folder, dataset.split)
        if path.exists():
            if dataset.subset is not None:
                raise DataError(f"{path}: subset {dataset.subset!r} says nothing about a single file; remove it")
            if dataset.split != "train":
                raise DataError(f"{path}: split {dataset.split!r} says nothing about a single file; remove it")
            return [path]
    except OSError as error:
        shown = dataset.path if len(dataset.path) < 200 else f"{dataset.path[:200]}..."
        raise DataError(f"{shown}: cannot be read ({error.strerror or error}); correct `path` or its rights") from None
    if path.suffix in _SUFFIXES or path.is_absolute() or dataset.path.startswith("."):
        raise DataError(f"{path}: no such file (data set {dataset.name!r}); correct its `path`")
    return None


def identity_of(dataset: DatasetConfig) -> list[str] | None:
    """Names, sizes and times of the files; what a streamed set is asked for; None for what only the hub can tell."""
    if dataset.streaming:
        return [dataset.path, dataset.subset or "", dataset.split]
    files = files_of(dataset)
    if files is None:
        return None
    stats = [(file, file.stat()) for file in files]
    return [f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]


def _saved_files(folder: Path, split: str) -> list[Path] | None:
    """Tables of a folder that `datasets` wrote (`save_to_disk`), in order; None for any other folder."""
    if (index := folder / "dataset_dict.json").is_file():
        splits = _names(index, "splits")
        if split not in splits:
            raise DataError(f"{folder}: no split {split!r}; the folder holds {', '.join(splits)}: correct `split`")
        return _saved_files(folder / split, "train")
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    if split != "train":
        raise DataError(f"{folder}: split {split!r} says nothing about a single saved data set; remove it")
    return [folder / Path(name).name for name in _names(state, "_data_files")]


def _names(index: Path, key: str) -> list[str]:
    """What a file of `save_to_disk` lists under `key`: names, or objects with a `filename`."""
    try:
        listed = parse_json(index.read_bytes())[key]
        return [one if isinstance(one, str) else str(one["filename"]) for one in listed]
    except (StrictJsonError, KeyError, TypeError):
        raise DataError(f"{index}: damaged, it lists no {key!r}; save the data set again") from None


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Files named after `split`; all of them where none is named after any split."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; correct `subset`, or remove it")
    files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if not files:
        raise DataError(f"{folder}: the folder holds no .jsonl, .json or .parquet file")
    own = re.compile(rf"{re.escape(split)}(?=$|[-_.\d])")
    chosen = [file for file in files if own.match(file.stem)]
    if chosen:
        return chosen
    named = sorted({match[0] for file in files if (match := _SPLIT_FILE.match(file.stem))})
    if named or split != "train":
        raise DataError(
            f"{folder}: no file of split {split!r}; the folder holds {', '.join(file.name for file in files[:6])}: set "
            "`split` to the beginning of a file's name, or `path` to a file; `rows` cuts"
        )
    return files
