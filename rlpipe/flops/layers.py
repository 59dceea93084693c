"""The building blocks of a decoder and what each costs in a forward pass.

One multiply-add is 2 FLOPs. Only matmul-like work counts: norms, softmax, rotary embedding, activations, elementwise
gates, top-k and the embedding lookup are 0. `weights_flops` is the work of one token with parameters;
softmax attention adds `core_flops_per_doubled_pair` for each half (query, key) pair, Gated DeltaNet a fixed amount
for each token.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Softmax attention with grouped key/value heads.

    output_gate: the query projection also makes a gate of the heads' width (Qwen3-Next, Qwen3.5).
    window: keys that a query sees, itself included; None is unlimited.
    """

    hidden_size: int
    heads: int
    key_value_heads: int
    head_dim: int
    output_gate: bool = False
    window: int | None = None

    @property
    def weights_flops(self) -> int:
        query_heads = self.heads * (2 if self.output_gate else 1)
        projected_in = (query_heads + 2 * self.key_value_heads) * self.head_dim
        projected_out = self.heads * self.head_dim
        return 2 * self.hidden_size * (projected_in + projected_out)

    @property
    def score_flops_per_doubled_pair(self) -> int:
        """The product of queries and keys alone."""
        return self.heads * self.head_dim

    @property
    def core_flops_per_doubled_pair(self) -> int:
        return 2 * self.heads * self.head_dim

    @property
    def up_projection_flops(self) -> int:
        return 0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its unabsorbed training form."""

    hidden_size: int
    heads: int
    query_rank: int | None
    key_value_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    window: int | None = None

    @property
    def query_head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim

    @property
    def up_projection_flops(self) -> int:
        """From the latents to the heads; what Megatron's `mla_up_proj` computes again."""
        query = 0 if self.query_rank is None else self.query_rank * self.heads * self.query_head_dim
        key_value = self.key_value_rank * self.heads * (self.nope_head_dim + self.value_head_dim)
        return 2 * (query + key_value)

    @property
    def weights_flops(self) -> int:
        query_width = self.heads * self.query_head_dim if self.query_rank is None else self.query_rank
        down = query_width + self.key_value_rank + self.rope_head_dim
        return 2 * self.hidden_size * (down + self.heads * self.value_head_dim) + self.up_projection_flops

    @property
    def score_flops_per_doubled_pair(self) -> int:
        return self.heads * self.query_head_dim

    @property
    def core_flops_per_doubled_pair(self) -> int:
        return self.heads * (self.query_head_dim + self.value_head_dim)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule (arXiv 2412.06464): linear in the sequence's length, so it never has a quadratic term."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def weights_flops(self) -> int:
        """Projections to q, k, v, z (gate), b and a, the short depthwise convolution of q, k, v, and the way out."""
        keys = self.key_heads * self.key_head_dim
        values = self.value_heads * self.value_head_dim
        projections = 2 * self.hidden_size * (2 * keys + 2 * values + 2 * self.value_heads + values)
        return projections + 2 * self.conv_width * (2 * keys + values)

    @property
    def core_flops(self) -> int:
        """`8 V^2` for each value head and token, as Megatron-LM and Megatron-Bridge count it."""
        return 8 * self.value_heads * self.value_head_dim**2

    def chunked_forward_flops(self, chunk_tokens: int) -> int:
        """What the chunked kernels of FLA and FlashQLA execute for a token: whole tiles of chunk x chunk."""
        c, k, v = chunk_tokens, self.key_head_dim, self.value_head_dim
        return self.value_heads * (6 * c * k + 4 * c * v + 6 * k * v)

    def chunked_backward_flops(self, chunk_tokens: int) -> int:
        """FLA's backward kernels as written: the forward's intermediate products are computed again."""
        c, k, v = chunk_tokens, self.key_head_dim, self.value_head_dim
        return self.value_heads * (18 * c * k + 10 * c * v + 16 * k * v + 4 * c**2)


@dataclass(frozen=True)
class DenseFeedForward:
    """Gated feed-forward (SwiGLU): three matrices."""

    hidden_size: int
    intermediate_size: int

    @property
    def weights_flops(self) -> int:
        return 6 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class MixtureOfExperts:
    """Routed experts, the router, and a shared expert where there is one (`shared_intermediate_size` above 0)."""

    hidden_size: int
    experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    @property
    def shared_flops(self) -> int:
        if not self.shared_intermediate_size:
            return 0
        gate = 2 * self.hidden_size if self.shared_gate else 0
        return 6 * self.hidden_size * self.shared_intermediate_size + gate

    @property
    def routed_flops(self) -> int:
        return 6 * self.hidden_size * self.experts_per_token * self.expert_intermediate_size

    @property
    def weights_flops(self) -> int:
        return self.routed_flops + 2 * self.hidden_size * self.experts + self.shared_flops


SoftmaxAttention = GroupedQueryAttention | LatentAttention
Mixer = SoftmaxAttention | GatedDeltaNet
FeedForward = DenseFeedForward | MixtureOfExperts


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: a token mixer, then a feed-forward part."""

    mixer: Mixer
    feed_forward: FeedForward
