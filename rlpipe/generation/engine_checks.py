"""What engines would refuse when they start, or in the middle of a run, said before anything starts."""

from dataclasses import replace
from pathlib import Path

from rlpipe.config.root import Config
from rlpipe.model.actor_checks import check_engine_layout
from rlpipe.model.description import ModelDescription
from rlpipe.model.draft_checks import check_drafts
from rlpipe.model.fp8_checks import check_fp8
from rlpipe.model.hub import model_folder
from rlpipe.model.model_reader import PREDICTION_TENSOR, describe_model, end_tokens
from rlpipe.model.weight_checks import tensor_files
from rlpipe.shared.errors import ConfigError, ModelError
from rollout.arguments import CONTEXT_RESERVE_TOKENS, check_argument_names
from rollout.sglang_source import declared_server_arguments

# With one of these, SGLang divides some layers otherwise than over all ranks of an engine.
_LAYOUT_ARGUMENTS = frozenset({"enable_dp_attention", "dp_size", "ep_size", "moe_dense_tp_size", "pp_size"})


def check_engines(config: Config) -> None:
    """Raise RlpipeError for arguments that SGLang lacks, for responses that the model's context cannot hold, for sizes
    that an engine's ranks do not divide, for drafts that the model cannot make, and for a model whose responses could
    not end.

    Reads the model folder's configurations, and of its weights the names.
    """
    if config.rollout.engine.sglang:
        check_argument_names(config.rollout.engine.sglang, declared_server_arguments())
    folder = model_folder(config.model.path)
    model = describe_model(folder)
    check_engine_sizes(config, model)
    _check_stop_tokens(config, model, folder)
    _check_drafts(config, model, folder)
    ends = {token for token in end_tokens(folder) if token < model.vocab_size}
    if not ends and not _stops_otherwise(config):
        raise ModelError(
            f"{folder}: no end token of the vocabulary in config.json or generation_config.json (eos_token_id), so "
            "every response would run to its limit: add it there, or set rollout.sampling.stop_token_ids "
            "(ignore_eos: true if that is meant)"
        )


def check_engine_sizes(config: Config, model: ModelDescription) -> None:
    """The part of `check_engines` that needs no folder: raise RlpipeError for responses that the context of `model`
    cannot hold, and for sizes that an engine's ranks do not divide."""
    _check_context(config, model)
    _check_fp8(config, model)
    if not _LAYOUT_ARGUMENTS & set(config.rollout.engine.sglang):
        check_engine_layout(model, config.rollout.engine.tensor_parallel)


def _check_fp8(config: Config, model: ModelDescription) -> None:
    """Other layouts than over tensor and expert ranks are SGLang's to refuse, when the engine starts."""
    engine = config.rollout.engine
    layout = _LAYOUT_ARGUMENTS & set(engine.sglang)
    if engine.quantization != "none" and layout <= {"ep_size"}:
        check_fp8(model, engine.quantization, engine.tensor_parallel, int(engine.sglang.get("ep_size", 1)))


def _check_context(config: Config, model: ModelDescription) -> None:
    longest, given = (
        config.data.max_prompt_tokens + config.longest_response_tokens,
        config.rollout.engine.context_tokens,
    )
    if given is not None and model.max_positions is not None and given > model.max_positions:
        raise ConfigError(
            f"rollout.engine.context_tokens is {given}, but {config.model.path} has max_position_embeddings = "
            f"{model.max_positions}: lower the one, or raise the other"
        )
    context = given or model.max_positions
    if context is not None and longest + CONTEXT_RESERVE_TOKENS > context:
        name = "rollout.engine.context_tokens" if given else f"max_position_embeddings of {config.model.path}"
        raise ConfigError(
            f"data.max_prompt_tokens + max_response_tokens is {longest} tokens, and SGLang keeps "
            f"{CONTEXT_RESERVE_TOKENS} more, but {name} is {context}: shorten prompts or responses, or raise it"
        )
    cache = config.rollout.engine.kv_cache_tokens
    if cache is not None and longest + CONTEXT_RESERVE_TOKENS > cache:
        raise ConfigError(
            f"rollout.engine.kv_cache_tokens is {cache}, too few for one sequence of up to {longest} tokens "
            f"(data.max_prompt_tokens + max_response_tokens) and {CONTEXT_RESERVE_TOKENS} more: raise it"
        )


def _check_drafts(config: Config, model: ModelDescription, folder: Path) -> None:
    draft = config.rollout.engine.draft
    stored = draft.predicts and PREDICTION_TENSOR in tensor_files(folder)
    if stored and not model.mtp_layers:
        model = replace(model, mtp_layers=1)
    check_drafts(model, draft, config.algorithm.routing_replay)
    if draft.predicts and not stored:
        raise ModelError(
            f"{folder} has a multi-token-prediction layer in its config.json, but not in its weights "
            f"({PREDICTION_TENSOR}), so rollout.engine.draft.method {draft.method!r} has nothing to draft with: take a "
            "folder that holds them, or set it to 'ngram' or 'off'"
        )


def _check_stop_tokens(config: Config, model: ModelDescription, folder: Path) -> None:
    outside = [token for token in _stop_tokens(config) if token >= model.vocab_size]
    if outside:
        raise ConfigError(
            f"sampling.stop_token_ids has {outside[0]}, which no response can contain: the vocabulary of {folder} has "
            f"{model.vocab_size} tokens; remove it"
        )


def _stop_tokens(config: Config) -> list[int]:
    """Ids that end responses somewhere in this run, besides the model's own."""
    overrides = [one.sampling.stop_token_ids for one in config.data.train]
    overrides += [one.sampling.stop_token_ids for one in config.eval.datasets]
    return [*config.rollout.sampling.stop_token_ids, *(token for ids in overrides for token in ids or ())]


def _stops_otherwise(config: Config) -> bool:
    return config.rollout.sampling.ignore_eos or bool(_stop_tokens(config)) or config.uses_stop_strings
