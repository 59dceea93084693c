"""The errors a user can cause or fix. Each carries one sentence: the value, the place and the fix.

The command line prints the sentence and exits with `EXIT_CODE`; a traceback is shown only with `--debug`.
Anything that is not one of these is a defect of rlpipe and keeps its traceback.
"""

EXIT_CODE = 2


class RlpipeError(Exception):
    """Base of all errors that are shown to the user as one sentence."""


class ConfigError(RlpipeError):
    """A configuration file or an override is wrong."""


class DataError(RlpipeError):
    """A data file is missing, malformed or lacks a column."""


class ModelError(RlpipeError):
    """A model folder is missing a file, has an unsupported architecture or tensors that do not fit."""


class FileKindError(RlpipeError):
    """A pipe, socket or device stands where a file is needed."""


class ResourceError(RlpipeError):
    """The machine or cluster lacks what the run needs: memory, GPUs, ports, disk."""


class DiskFullError(ResourceError):
    """No room is left where the run writes; what needs to write there fails until there is some."""


class RolloutError(RlpipeError):
    """A rollout engine failed, died or answered something that cannot be used."""


class EngineFailure(RolloutError):
    """An engine died, hangs or answers what cannot be used; what was asked of it can be asked of another one."""


class ActorError(RlpipeError):
    """The training side failed or was asked for something that it cannot do."""


class ActorLostError(ActorError):
    """A process of the actor died or hangs, or an exchange between its processes failed: all have to start again."""


class CheckpointError(RlpipeError):
    """A checkpoint is missing, incomplete, corrupt or belongs to another configuration."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written; an older one may be whole."""


class WeightSyncError(RlpipeError):
    """The rollout engines did not receive the weights that were sent."""


class DeadlineError(RlpipeError):
    """A remote call took longer than its phase allows; the message holds the stack of the slow worker."""


class JitError(RlpipeError):
    """Kernels compile after warm-up in a run that is configured to stop then."""
