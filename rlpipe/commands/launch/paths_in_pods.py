"""Whether what a configuration names by path is there in the pods of a Kubernetes job."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from rlpipe.config.cluster import KubernetesConfig
from rlpipe.config.root import Config
from rlpipe.model.hub import HubName
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import ROOT

_IN_IMAGE = "configs/"
_FILES = (".jsonl", ".json", ".parquet")
_SHOWN = 3


def check_paths(config: Config, settings: KubernetesConfig) -> None:
    """Raises ConfigError for models, data and folders that lie in one pod alone, or are not there at all."""
    places = [PurePosixPath(volume.path) for volume in settings.volumes]
    places += [PurePosixPath(mount["mountPath"]) for mount in _raw_mounts(settings)]
    wrong = [f"{key} = {path}" for key, path in _folders(config) if path and not _is_shared(path, places)]
    wrong += [
        f"{key} = {path}"
        for key, path in _sources(config)
        if path and not _is_shared(path, places) and not _is_had(path, config)
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"pods do not share {', '.join(wrong[:_SHOWN])}{more}: name places below a volume of the cluster's file "
            f"({', '.join(map(str, places)) or 'it has none'}), or a model or data set of the hub"
        )


def _folders(config: Config) -> Iterator[tuple[str, str | None]]:
    yield "run.directory", config.run.directory
    yield "prepare.directory", config.prepare.directory


def _sources(config: Config) -> Iterator[tuple[str, str | None]]:
    yield "model.path", config.model.path
    yield "model.reference_path", config.model.reference_path
    for section, datasets in (("data.train", config.data.train), ("eval.datasets", config.eval.datasets)):
        for index, dataset in enumerate(datasets):
            yield f"{section}[{index}].path", dataset.path


def _is_shared(path: str, places: Sequence[PurePosixPath]) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def _is_had(path: str, config: Config) -> bool:
    """Whether each pod finds it by itself: in the image, or on the hub."""
    if path.startswith(_IN_IMAGE):
        return (ROOT / path).exists()
    # A policy that the run makes has a place, not a name.
    made = path == config.model.path and config.prepare.policy is not None
    on_hub = HubName.parse(path) is not None and PurePosixPath(path).suffix not in _FILES and not Path(path).exists()
    return on_hub and not made


def _raw_mounts(settings: KubernetesConfig) -> Iterator[dict[str, str]]:
    for container in settings.pod.get("spec", {}).get("containers", []):
        yield from container.get("volumeMounts", [])
