"""What lengths of sequences and packs are multiples of. Imports nothing heavy: configurations need it, too."""

import math


def sequence_multiple(context_parallel: int) -> int:
    """The padded length of every sequence is a multiple of it: each context rank holds two equal pieces."""
    return 2 * context_parallel if context_parallel > 1 else 1


def pack_multiple(context_parallel: int, tensor_parallel: int, sequence_parallel: bool) -> int:
    """The padded length of a pack is a multiple of it: with sequence parallelism the tensor ranks share a context
    rank's tokens evenly."""
    shared = tensor_parallel * context_parallel if sequence_parallel else 1
    return math.lcm(sequence_multiple(context_parallel), shared)
