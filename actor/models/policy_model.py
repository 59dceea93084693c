"""The policy: Megatron's GPTModel that takes a pack and returns hidden states, so that logits never exist."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from actor.head import response_logprobs
from actor.layers.expert_dispatch import install_feed_forward
from actor.layers.lora import HeadLora, LoraColumnLinear
from actor.layers.packed import PackInputs
from actor.layers.rope import cos_sin, inverse_frequencies
from actor.layers.router import install_replay
from actor.models.mtp import AddLoss
from rlpipe.config.lora import LoraConfig
from rlpipe.model.description import TrainableModel
from rlpipe.shared.errors import ActorError


class HeadWeight(LoraColumnLinear):
    """The vocab-parallel output layer, whose call returns its weight instead of logits.

    Calling the module (and not reading the attribute) lets DistributedDataParallel's pre-forward hook wait for an
    overlapped parameter gather first.
    """

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        """[padded vocabulary / TP, hidden]."""
        return self.weight


class PolicyModel(GPTModel):
    """One pipeline chunk of the policy; call it with `PackInputs`.

    head_chunk_tokens: tokens whose logits exist at the same time in the loss of multi-token prediction.
    lora: the adapters that `install_adapters` gave it, None where the model itself is trained.
    mtp_losses: weighted losses of multi-token prediction, one per trained pack, until `take_mtp_loss` collects them.
    """

    def __init__(
        self, model: TrainableModel, config: Any, *, padded_vocab_size: int, head_chunk_tokens: int, **kwargs: Any
    ) -> None:
        super().__init__(
            config=config,
            vocab_size=padded_vocab_size,
            max_sequence_length=model.max_positions,
            position_embedding_type="none",
            share_embeddings_and_output_weights=model.tied_embeddings,
            parallel_output=True,
            **kwargs,
        )
        self.description = model
        self._head_chunk_tokens = head_chunk_tokens
        self.lora: LoraConfig | None = None
        self.mtp_losses: list[torch.Tensor] = []
        self._frequencies = inverse_frequencies(model.rope).to(torch.cuda.current_device())
        install_feed_forward(self)
        for layer in self.decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                install_replay(layer, layer.layer_number - 1)
        if self.post_process:
            self.output_layer.__class__ = HeadWeight
            self.output_layer.register_module("lora", None)

    def forward(self, inputs: PackInputs) -> torch.Tensor:
        """Hidden states [t, 1, h] of this rank's tokens (a 1/TP slice of them under sequence parallelism).

        On the last stage they have passed the final norm; `actor.head` turns them into log-probabilities. Where
        multi-token prediction is trained, its loss joins the backward pass of these hidden states.

        Raises:
            ActorError: the tokens do not divide over the tensor-parallel ranks of sequence parallelism.
        """
        self._check_shards(inputs)
        token_ids, position_ids = inputs.token_ids.unsqueeze(0), inputs.position_ids.unsqueeze(0)
        embedded = self._reached(self.embedding(token_ids, position_ids)) if self.pre_process else None
        rotary = cos_sin(self._frequencies, inputs.position_ids, self.config.params_dtype)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=rotary,
            packed_seq_params=inputs.sequences,
        )
        if self.mtp_process and torch.is_grad_enabled():
            hidden = AddLoss.apply(hidden, self._mtp_loss(hidden, rotary, inputs))
        return hidden

    def _reached(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of a frozen embedding that gradients travel to nevertheless, where activations are computed
        again: a module that is called without gradient then would leave out those of its parameters, silently."""
        recomputed = self.config.recompute_granularity is not None and torch.is_grad_enabled()
        return hidden.requires_grad_() if recomputed and not hidden.requires_grad else hidden

    def _mtp_loss(self, hidden: torch.Tensor, rotary: torch.Tensor, inputs: PackInputs) -> torch.Tensor:
        """Weighted cross entropy of the token after next; see `actor.models.mtp` for why everything is detached."""
        next_ids = inputs.targets.unsqueeze(0)
        embedded = self.embedding(next_ids, inputs.position_ids.unsqueeze(0)).detach()
        predicted = self.mtp.layers[0](self._reached(hidden.detach()), embedded, rotary, inputs.sequences)
        scores = response_logprobs(
            predicted,
            head_weight(self).detach(),
            inputs.next_targets,
            vocab_size=self.description.vocab_size,
            chunk_tokens=self._head_chunk_tokens,
            sequence_parallel=self.config.sequence_parallel,
        )
        loss = -(scores.logprobs * inputs.next_weights).sum()
        self.mtp_losses.append(loss.detach())
        return loss * self.config.mtp_loss_scaling_factor

    def _check_shards(self, inputs: PackInputs) -> None:
        tokens, shards = inputs.token_ids.shape[0], self.config.tensor_model_parallel_size
        if self.config.sequence_parallel and tokens % shards:
            raise ActorError(
                f"a pack of {tokens} tokens per context-parallel rank does not divide over {shards} sequence-parallel "
                "ranks: pad it to ActorLayout.pack_multiple"
            )


def policy_of(chunk: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside DistributedDataParallel or other wrappers."""
    return unwrap_model(chunk)


def take_mtp_loss(chunk: torch.nn.Module) -> torch.Tensor | None:
    """Sum of the multi-token-prediction losses of this rank's packs since the last call; None without any."""
    policy = policy_of(chunk)
    losses, policy.mtp_losses = policy.mtp_losses, []
    return torch.stack(losses).sum() if losses else None


def head_weight(chunk: torch.nn.Module) -> torch.Tensor:
    """The vocab-parallel head [padded vocabulary / TP, hidden] of a last-stage chunk, tied or not."""
    policy = policy_of(chunk)
    weight = policy.output_layer()
    return policy.shared_embedding_or_output_weight() if weight is None else weight


def head_adapter(chunk: torch.nn.Module) -> HeadLora | None:
    """The adapter of the head of a last-stage chunk."""
    return policy_of(chunk).output_layer.lora


def padded_vocabulary(vocab_size: int) -> int:
    """The vocabulary rounded up so that each tensor-parallel rank holds a multiple of 8 rows."""
    multiple = 8 * parallel_state.get_tensor_model_parallel_world_size()
    return -(-vocab_size // multiple) * multiple
