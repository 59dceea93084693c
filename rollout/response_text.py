"""The text of responses, decoded in the engine's own process: hundreds of engines share what would keep the driver,
one process, busy for longer than anything else that it does."""

from typing import Any

import numpy as np

from rlpipe.model.hub import model_folder
from rlpipe.shared.number_arrays import Tokens


def open_tokenizer(model_path: str) -> Any:
    """The tokenizer that the driver has checked already: of the same folder, by the same library."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(model_path), trust_remote_code=False)


def text_of(token_ids: Tokens, tokenizer: Any) -> str:
    """What graders and generate functions read: special tokens are left out."""
    # transformers looks at every element of a list, but takes an array as it is.
    return str(tokenizer.decode(np.asarray(token_ids, dtype=np.int64), skip_special_tokens=True))
