"""Whether the configured actor can train the policy as the algorithm says, said before anything starts."""

from pathlib import Path

from actor.hf.adapter_files import check_adapter_folder
from actor.hf.adapter_table import adapter_table
from actor.hf.frozen_parameters import frozen_targets
from actor.hf.safetensors_reader import check_stored_shapes
from actor.losses.loss_registry import check_loss
from rlpipe.algorithms.advantages import advantage_function
from rlpipe.config.root import Config
from rlpipe.flops.route_shape import route_shape
from rlpipe.model.actor_checks import check_actor, check_reference
from rlpipe.model.description import ModelDescription, TrainableModel
from rlpipe.model.hub import model_folder
from rlpipe.model.model_reader import describe_model, trainable_model
from rlpipe.model.weight_checks import check_tied_head
from rlpipe.shared.errors import ConfigError, ModelError


def check_policy(config: Config) -> None:
    """Raise ModelError or ActorError, in one sentence, for a policy or a reference that `config.actor` cannot train:
    its architecture, layout, frozen parameters, adapters, recomputation, sequences longer than its positions, stored
    shapes unlike config.json, or a stored head that would be dropped.

    Reads configurations, headers and the head of a tied model, no other weights.
    """
    folder = model_folder(config.model.path)
    policy = trainable_model(folder)
    check_policy_sizes(config, policy)
    if config.actor.frozen_parameters:
        frozen_targets(policy, config.actor)
    _check_adapters(config, policy)
    check_stored_shapes(policy, folder, config.actor.train_mtp)
    check_tied_head(policy, folder)
    if config.model.reference_path:
        folder = model_folder(config.model.reference_path)
        reference = trainable_model(folder)
        check_reference(policy, reference)
        check_stored_shapes(policy, folder, config.actor.train_mtp)
        check_tied_head(reference, folder)


def _check_adapters(config: Config, policy: TrainableModel) -> None:
    lora = config.actor.lora
    if lora is None:
        return
    table = adapter_table(policy, lora, padded_vocab_size=policy.vocab_size)
    if lora.start_path is not None:
        check_adapter_folder(Path(lora.start_path), table, lora)
    if config.model.reference_path is not None:
        raise ConfigError(
            f"model.reference_path is {config.model.reference_path}, but with actor.lora the reference is the model "
            "without its adapters: leave it out"
        )


def check_algorithm(config: Config) -> None:
    """Raise ConfigError for an advantage or a loss that cannot be found or called, and for routes of a model without
    experts."""
    advantage_function(config.algorithm.advantage)
    check_loss(config.algorithm.loss)
    if config.algorithm.routing_replay:
        route_shape(describe_model(config.model.path).shape)


def check_policy_sizes(config: Config, policy: ModelDescription) -> None:
    """The part of `check_policy` that needs no folder: raise ModelError for a layout that does not divide the policy,
    layers that it does not have, and sequences longer than its positions."""
    check_actor(policy, config.actor)
    if policy.max_positions is not None and config.longest_sequence_tokens > policy.max_positions:
        raise ModelError(
            f"sequences of up to {config.longest_sequence_tokens} tokens are trained, but {config.model.path} has "
            f"max_position_embeddings = {policy.max_positions}: shorten prompts, responses or examples, or "
            "take a model with a longer context"
        )
