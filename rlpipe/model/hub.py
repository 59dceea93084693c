"""A model by name: a folder, or a repository of the Hugging Face hub as `owner/name` or `owner/name@revision`.

What the local cache holds is used as it is and the hub is not asked, so that all processes of a run and those of a
resumed one read the same files; the rest is downloaded. `HF_HOME` (the cache), `HF_HUB_OFFLINE` and `HF_TOKEN` mean
what they mean to huggingface_hub.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rlpipe.shared.errors import ModelError

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "README.md", "LICENSE*"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "openvino/*", "gguf/*"]  # the same weights in other formats
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, and a branch, tag or commit of it; the main branch when None."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """None where `text` cannot be the name of a repository."""
        match = _NAME.fullmatch(text)
        return cls(match["repository"], match["revision"]) if match else None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def model_folder(model: str | Path) -> Path:
    """The local folder (or file) of `model`, downloaded where it is not there yet.

    Raises ModelError when it is neither there nor to be had; the sentence names the command that downloads.
    """
    path = Path(model)
    if path.exists():
        return path
    name = _hub_name(model)
    return _cached(name) or _download(name, whole=True)


def model_config_file(model: str | Path) -> Path:
    """`config.json` of `model`; of a repository that is not in the cache nothing else is downloaded."""
    path = Path(model)
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    name = _hub_name(model)
    return (_snapshot(name) or _download(name, whole=False)) / "config.json"


def is_cached(model: str) -> bool:
    """Whether `model` names a repository whose configuration is in the local cache."""
    name = HubName.parse(model)
    return name is not None and _snapshot(name) is not None


def pinned(model: str) -> str:
    """What `model` means now, for other nodes and other days: a name with its commit, a folder's absolute path."""
    if Path(model).exists():
        return str(Path(model).absolute())
    name = _hub_name(model)
    return f"{name.repository}@{model_folder(model).name}"


def _hub_name(model: str | Path) -> HubName:
    name = HubName.parse(str(model))
    if name is None:
        raise ModelError(
            f"{model}: no such model folder; give a folder in Hugging Face layout (config.json, *.safetensors, a "
            "tokenizer) or a name on the hub such as Qwen/Qwen3-0.6B"
        )
    return name


def _snapshot(name: HubName) -> Path | None:
    """The cached files of a revision, however many are there; None without a configuration."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name.repository, "config.json", revision=name.revision)
    return Path(found).parent if isinstance(found, str) else None


def _cached(name: HubName) -> Path | None:
    """The cached files of a revision, if a download of all of them was completed."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except errors.LocalEntryNotFoundError:
        return None
    return Path(folder) if _has_weights(Path(folder)) else None


def _has_weights(folder: Path) -> bool:
    index = folder / _INDEX
    if index.exists():
        return all((folder / file).exists() for file in set(json.loads(index.read_text())["weight_map"].values()))
    return any(folder.glob("*.safetensors"))


def _download(name: HubName, whole: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = _WANTED if whole else ["config.json"]
    try:
        folder = snapshot_download(
            name.repository, revision=name.revision, allow_patterns=patterns, ignore_patterns=_UNWANTED
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{name}: the hub gives this model only to accounts that accepted its terms: accept them on its page, and "
            "set HF_TOKEN to a token of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name}: the hub's {name.repository} has no revision {name.revision!r}: correct it") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: no such folder here, and no such model on the hub: correct the name, or set HF_TOKEN if it is "
            "private"
        ) from None
    except (OSError, errors.HfHubHTTPError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(_unreachable(name, str(error).splitlines()[0].rstrip("."))) from None
    if not (Path(folder) / "config.json").exists() or (whole and not _has_weights(Path(folder))):
        # Without network, an interrupted download is what the cache gives.
        raise ModelError(_unreachable(name, "config.json or *.safetensors files are missing there"))
    return Path(folder)


def _unreachable(name: HubName, cause: str) -> str:
    from huggingface_hub import constants

    revision = f" --revision {name.revision}" if name.revision else ""
    cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else cause
    return (
        f"{name}: neither a folder here nor complete in the hub's cache {constants.HF_HUB_CACHE}, and nothing can be "
        f"downloaded ({cause}): run `hf download {name.repository}{revision}` where there is network, with this cache "
        "or HF_HOME pointing to it"
    )
