"""The model that drafts, found from the model that it drafts for, and kept whole with it while an engine sleeps."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from rlpipe.shared.replaced_parts import replaces

_SHARE_HEAD = replaces(
    "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker.init_lm_head",
    why="only the worker that drafts knows both models, and an update of weights is for both",
    drop_when="SGLang's WeightUpdater of broadcasts updates the drafting model, too",
)
_STATE = replaces(
    "sglang.srt.managers.scheduler_components.weight_updater:_export_static_state",
    "sglang.srt.managers.scheduler_components.weight_updater:_import_static_state",
    why="what the drafting model keeps beside its weights would be lost when an engine sleeps",
    drop_when="SGLang keeps it, as it keeps the model's own",
)

_ATTRIBUTE = "_rlpipe_drafting_model"
_PREFIX = "mtp."


def install() -> None:
    """Call in a scheduler process of an engine that drafts with the model's prediction layer."""
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    EagleDraftWorker.init_lm_head = _noting(_SHARE_HEAD.original())
    weight_updater._export_static_state = _exporting(_STATE.original(0))
    weight_updater._import_static_state = _importing(_STATE.original(1))


def with_drafting_model(model: Any) -> Any:
    """`model`, or where another one drafts for it, both as one that loads weights."""
    drafting = vars(model).get(_ATTRIBUTE)
    return model if drafting is None else _Both(model, drafting)


class _Both:
    """What a weight loader needs of a model, of two that share embedding and head."""

    def __init__(self, model: Any, drafting: Any) -> None:
        self._model = model
        self._drafting = drafting

    def parameters(self) -> Iterator[torch.Tensor]:
        return chain(self._model.parameters(), self._drafting.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return chain(self._model.buffers(), self._drafting.buffers())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Those of the prediction layer go to the model that drafts, all others to the model."""
        pairs = list(weights)
        own = [pair for pair in pairs if not pair[0].startswith(_PREFIX)]
        drafting = [pair for pair in pairs if pair[0].startswith(_PREFIX)]
        if own:
            self._model.load_weights(own)
        if drafting:
            self._drafting.load_weights(drafting)


def note(model: Any, drafting: Any) -> None:
    """Remember that `drafting` drafts for `model`; past torch, of which it would become a part otherwise."""
    object.__setattr__(model, _ATTRIBUTE, drafting)


def _noting(share_head: Callable[[Any], None]) -> Callable[[Any], None]:
    def init_lm_head(worker: Any) -> None:
        share_head(worker)
        note(worker.target_worker.model_runner.model, worker.draft_runner.model)

    return init_lm_head


def _exporting(export: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    def export_both(model: Any) -> dict[str, Any]:
        drafting = vars(model).get(_ATTRIBUTE)
        return export(model) | ({} if drafting is None else {"drafting": export(drafting)})

    return export_both


def _importing(restore: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    def restore_both(model: Any, state: dict[str, Any]) -> None:
        restore(model, state)
        if "drafting" in state:
            restore(vars(model)[_ATTRIBUTE], state["drafting"])

    return restore_both
