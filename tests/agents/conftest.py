import json

import pytest
from agent_support import TOOLS
from random_policy_engine import TEXTS

from rlpipe.prepare.tokenizer import byte_tokenizer
from tests.merging_tokenizer import merging_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session", params=["bytes", "merged"])
def any_tokenizer(request):
    """Of single bytes, and of whole words."""
    if request.param == "bytes":
        return byte_tokenizer()
    call = {"name": "look_up", "arguments": {"text": "a plain answer", "number": 77}}
    return merging_tokenizer([*TEXTS, f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n", json.dumps(TOOLS)])
