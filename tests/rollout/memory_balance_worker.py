"""Prints as JSON what SGLang says of an engine one of whose GPUs has less free memory than another, with the variables
of our engines and without them."""

import json
import os

from sglang.srt.distributed.bootstrap import _check_tp_memory_balance


def said() -> str:
    try:
        _check_tp_memory_balance(pre_model_load_memory=30.0, local_gpu_memory=60.0)
    except RuntimeError as error:
        return str(error)
    return "starts"


with_variables = said()
del os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"]
print(json.dumps([with_variables, said()]))
