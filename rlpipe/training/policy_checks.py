"""Whether the configured actor can train the policy, said before anything starts."""

from actor.hf.frozen_parameters import frozen_targets
from rlpipe.config.root import Config
from rlpipe.model.actor_checks import check_actor, check_reference
from rlpipe.model.families import read_model
from rlpipe.model.hub import model_folder
from rlpipe.model.weight_checks import check_tied_head


def check_policy(config: Config) -> None:
    """Raise ModelError or ActorError, in one sentence, for a policy or a reference that `config.actor` cannot train:
    its architecture, layout, frozen parameters, recomputation, or a stored head that would be dropped.

    Reads configurations and the head of a tied model, no other weights.
    """
    folder = model_folder(config.model.path)
    policy = read_model(folder)
    check_actor(policy, config.actor)
    if config.actor.frozen_parameters:
        frozen_targets(policy, config.actor)
    check_tied_head(policy, folder)
    if config.model.reference_path:
        folder = model_folder(config.model.reference_path)
        reference = read_model(folder)
        check_reference(policy, reference)
        check_tied_head(reference, folder)
