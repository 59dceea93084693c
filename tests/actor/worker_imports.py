"""What every worker process of the tests imports, loaded once in the server that they are forked from."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a server that has started threads must not be forked

import megatron.core.optimizer  # noqa: F401
import transformers  # noqa: F401

import actor.trainer  # noqa: F401
