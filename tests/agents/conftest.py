import pytest

from rlpipe.prepare.tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()
