"""The shape of a model, as far as its FLOPs depend on it."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from rlpipe.flops.layers import DecoderLayer
from rlpipe.flops.vision import VisionTower


@dataclass(frozen=True)
class ModelShape:
    """A decoder, and a vision tower where there is one.

    vocab_size: rows of the head as the config says, not as a tensor-parallel layout pads them.
    mtp_layers: multi-token-prediction depths; each has the form of the last decoder layer, a projection from twice
        the hidden size and a pass through the head.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[DecoderLayer, ...]
    mtp_layers: int = 0
    vision: VisionTower | None = None

    @cached_property
    def layer_kinds(self) -> tuple[tuple[DecoderLayer, int], ...]:
        """Each kind of layer with how many there are; what adds up over layers need not look at equal ones again."""
        return tuple(Counter(self.layers).items())

    @property
    def head_flops(self) -> int:
        """Of one row of logits. Tied or not, the matmul is the same."""
        return 2 * self.vocab_size * self.hidden_size

    @property
    def mtp_projection_flops(self) -> int:
        return 4 * self.hidden_size**2

    @property
    def mtp_decoder_layers(self) -> tuple[DecoderLayer, ...]:
        return self.layers[-1:] * self.mtp_layers
