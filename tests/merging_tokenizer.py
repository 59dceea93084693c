"""A tokenizer like those of real models: tokens of several characters, which do not end where a string that is looked
for ends."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlpipe.prepare.tokenizer import byte_tokenizer

# As Qwen's tokenizers split: words with what stands before them, punctuation with the line breaks that follow it.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def merging_tokenizer(texts) -> PreTrainedTokenizerFast:
    """Merged until every word and run of punctuation of `texts` is one token; special tokens and chat template as those
    of `byte_tokenizer`."""
    plain = byte_tokenizer()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=5000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    merging = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        additional_special_tokens=["<|im_start|>"],
    )
    merging.chat_template = plain.chat_template
    return merging
