"""What of speculative decoding a model cannot do. Pure."""

from rlpipe.config.draft import DraftConfig
from rlpipe.model.description import ModelDescription
from rlpipe.shared.errors import ModelError

# Of what config.json calls them; SGLang has a drafting form of no other that has a prediction layer.
_DRAFTING = ("Qwen3NextForCausalLM", "Qwen3_5")


def check_drafts(model: ModelDescription, draft: DraftConfig, routing_replay: bool = False) -> None:
    """Raise ModelError for a `draft` that engines with `model` could not make or verify."""
    if draft.method == "off":
        return
    others = "'off'" if model.gated_delta_net is not None else "'ngram' or 'off'"
    where = f"rollout.engine.draft.method is {draft.method!r}, but"
    if draft.predicts and model.mtp_layers != 1:
        raise ModelError(
            f"{where} {model.architecture} has {model.mtp_layers} multi-token-prediction layers (it takes 1): set it "
            f"to {others}"
        )
    if draft.predicts and not model.architecture.startswith(_DRAFTING):
        raise ModelError(
            f"{where} SGLang cannot draft with the prediction layer of {model.architecture}: set it to {others}"
        )
    if draft.branches > 1 and model.gated_delta_net is not None:
        kind = "n-grams make" if draft.method == "ngram" else f"topk {draft.topk} makes"
        raise ModelError(
            f"{where} {kind} trees of drafts, which are not verified through the Gated DeltaNet layers of "
            f"{model.architecture}: set it to 'mtp' with topk 1, or to 'off'"
        )
    if draft.method == "ngram" and routing_replay:
        raise ModelError(
            f"{where} SGLang does not return the experts of tokens that an n-gram drafted, which "
            "algorithm.routing_replay needs: set it to 'mtp' or 'off'"
        )
