"""`rlpipe recipes`: the configurations that come with rlpipe, and copies of them to work with."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from rlpipe.config.load import configuration_files
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import CONFIGS, ROOT


def list_recipes() -> list[tuple[str, str]]:
    """Name and first sentence of each configuration: runs (demo/*, gpu/*, recipes/*) and places (clusters/*)."""
    return [(name, _first_sentence(CONFIGS / f"{name}.yaml")) for name in _names()]


def copy_recipe(name: str, folder: Path, overwrite: bool = False) -> list[Path]:
    """Copy a configuration with all that it is based on to `folder`/configs, where they find each other.

    name: as `list_recipes` tells it, its last part where that is clear, or its path below the project.
    Returns the files, the one that was asked for first. Raises ConfigError for an unknown name, and for a file that
    stands there with another content unless `overwrite`; nothing is copied then.
    """
    sources = configuration_files(_find(name))
    targets = [folder / source.relative_to(ROOT) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        if target.exists() and not overwrite and target.read_bytes() != source.read_bytes():
            raise ConfigError(f"{target} is there already and differs: copy to another folder, or add --overwrite")
    for source, target in zip(sources, targets, strict=True):
        if target.resolve() != source:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, source.read_bytes())
    return targets


def _names() -> list[str]:
    folders = ("demo", "gpu", "recipes", "clusters")
    found = [path for folder in folders for path in sorted(CONFIGS.glob(f"{folder}/*.yaml"))]
    return [str(path.relative_to(CONFIGS).with_suffix("")) for path in found]


def _find(name: str) -> Path:
    wanted = name.removeprefix("./").removeprefix("configs/").removesuffix(".yaml")
    names = _names()
    fitting = [wanted] if wanted in names else [one for one in names if one.split("/")[1] == wanted]
    if len(fitting) != 1:
        raise ConfigError(f"there is no one recipe {name!r}: {_advice(wanted, fitting, names)}")
    return CONFIGS / f"{fitting[0]}.yaml"


def _advice(wanted: str, fitting: Sequence[str], names: Sequence[str]) -> str:
    if fitting:
        return f"say which of {', '.join(fitting)}"
    near = difflib.get_close_matches(wanted, [*names, *(one.split("/")[1] for one in names)], 1)
    return (f"did you mean {near[0]!r}? " if near else "") + "`rlpipe recipes list` prints all"


def _first_sentence(path: Path) -> str:
    """Of the comment that a configuration begins with."""
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    return " ".join(lines).split(". ")[0].split(": `")[0].rstrip(".")
