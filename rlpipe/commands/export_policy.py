"""`rlpipe export RUN[@ITERATION] OUT`: a checkpoint's policy as a folder that others load. Needs no GPU and no Ray."""

import os
import shutil
import warnings
from pathlib import Path

from rlpipe.config.load import load_config
from rlpipe.model.hub import model_folder
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.checkpoint_folder import (
    checked_state,
    checkpoint_path,
    complete_checkpoints,
    iteration_of,
    stateless_checkpoints,
)
from rlpipe.shared.errors import CheckpointError, ConfigError, DamagedCheckpointError, ResourceError
from rlpipe.shared.policy_facts import is_saved_policy


def export_policy(run: str, output: Path, merge: bool = False, overwrite: bool = False) -> Path:
    """Write the policy of a run's newest checkpoint, or of `RUN@ITERATION`, to `output`; returns the checkpoint.

    merge: of a run with adapters the whole model instead of the adapters, in PEFT's layout.

    Raises ConfigError for a folder that holds no run, an output that is there already or a merge without adapters,
    CheckpointError for a checkpoint that is not there or damaged, ResourceError where the disk is too small.
    """
    folder, iteration = _parse(run)
    directory = RunDirectory(folder)
    if not directory.config.exists():
        raise ConfigError(f"{folder}: no run here (config.yaml is missing); give the folder of a run")
    _check_replaceable(output, overwrite)
    config = load_config(directory.config)
    checkpoint = _checkpoint(directory, iteration)
    state = checked_state(checkpoint)
    source = model_folder(config.model.path)
    adapters = config.actor.lora is not None and not merge
    if merge and config.actor.lora is None:
        raise ConfigError(f"{folder} trained the whole model: leave out --merge")
    if not adapters:
        _check_disk(source, output)
    from rlpipe.training.policies import policy_facts

    facts = policy_facts(config, directory, state["iteration"])
    _on_a_cpu()
    from actor.checkpoint_policy import export_adapters, export_checkpoint

    output.parent.mkdir(parents=True, exist_ok=True)
    if adapters:
        export_adapters(checkpoint, output.absolute(), source, config.actor, facts, base=config.model.path)
    else:
        export_checkpoint(checkpoint, output.absolute(), source, config.actor, facts)
    return checkpoint


def _check_replaceable(output: Path, overwrite: bool) -> None:
    """Nothing but a policy that was written by rlpipe is ever replaced."""
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise ConfigError(f"{output} exists: choose another folder, or replace it with --overwrite")
    if not is_saved_policy(output):
        raise ConfigError(
            f"{output} is no policy that rlpipe wrote, and --overwrite replaces nothing else: choose another folder"
        )


def _parse(run: str) -> tuple[Path, int | None]:
    """RUN@ITERATION; a folder whose own name has an @ and a number is taken as it is."""
    folder, at, number = run.rpartition("@")
    if not at or not number.isdecimal() or Path(run).exists():
        return Path(run), None
    return Path(folder), int(number)


def _checkpoint(directory: RunDirectory, iteration: int | None) -> Path:
    found = complete_checkpoints(directory.checkpoints)
    if not found:
        finished = f"; {directory.policy} is the final policy already" if directory.policy.exists() else ""
        raise CheckpointError(
            f"{directory.checkpoints}: no complete checkpoint to export (checkpoint.interval_iterations saves some)"
            f"{finished}"
        )
    if iteration is None:
        if damaged := [path for path in stateless_checkpoints(directory.checkpoints) if path > found[-1]]:
            raise DamagedCheckpointError(
                f"{damaged[-1]} has no state.json; for an older one give its iteration, as in "
                f"{directory.path}@{iteration_of(found[-1])}"
            )
        return found[-1]
    wanted = checkpoint_path(directory.checkpoints, iteration)
    if wanted not in found:
        there = ", ".join(str(iteration_of(path)) for path in found)
        raise CheckpointError(f"{directory.checkpoints}: no checkpoint of iteration {iteration}; there are {there}")
    return wanted


def _check_disk(source: Path, output: Path) -> None:
    """The policy takes about what the model took that it was trained from."""
    needed = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    place = next(parent for parent in output.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ResourceError(
            f"{place}: {free / 1e9:.1f} GB free, but the policy takes about {needed / 1e9:.1f} GB: choose another place"
        )


def _on_a_cpu() -> None:
    """Before torch is imported: exporting computes nothing, and GPUs may be busy with the run itself."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore", module=r"megatron\.")  # about kernels that an export does not use
