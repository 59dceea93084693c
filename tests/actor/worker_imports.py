"""What the worker processes of the tests import, loaded once in the server that they are forked from."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a server that has started threads must not be forked

import megatron.core.optimizer  # noqa: F401
import psutil  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401

import actor.megatron_patches.optimizer_fixes
import actor.megatron_patches.pipeline_fixes
import actor.trainer
import actor.weight_sender  # noqa: F401
import rewards.mathematics  # noqa: F401
import rlpipe.cli
import rlpipe.generation.inputs
import rlpipe.training.opening  # noqa: F401
from rlpipe.shared.collection import keep_what_lives

keep_what_lives()  # so that no process copies it, or looks at it for garbage
