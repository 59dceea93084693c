"""What drafts must bring to be worth their cost in a run, by the model of an engine's passes that `rlpipe plan` has."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.root import Config
from rlpipe.estimate.decoding import EnginePass, break_even_tokens
from rlpipe.estimate.memory import Model
from rlpipe.estimate.present_cluster import present_cluster
from rlpipe.estimate.run_estimate import MeanTokens, planned_lengths
from rlpipe.training.trained_share import planned_model


@dataclass(frozen=True)
class DraftCosts:
    config: Config
    model: Model
    cluster: ClusterConfig

    @staticmethod
    def of(config: Config) -> "DraftCosts | None":
        """None where nothing is to be said: without drafts, and for `auto`, which measures. GPUs are those that this
        process sees; where it sees none, careful defaults."""
        if config.rollout.engine.draft.method in ("off", "auto"):
            return None
        return DraftCosts(config, planned_model(config), present_cluster())

    def metrics(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Of an iteration with these metrics, with as many requests at a time as its samples and an engine allow."""
        if "rollout/draft_pass_tokens" not in measured:
            return {}
        rollout = self.config.rollout
        lengths = planned_lengths(self.config, MeanTokens(response=round(measured["rollout/response_tokens_mean"])))
        requests = min(rollout.engine.max_running_requests, -(-lengths.samples // rollout.engines))
        work = EnginePass.of(rollout, requests, lengths.mean_context_tokens)
        engine = rollout.engine
        tokens = break_even_tokens(self.model, self.cluster, engine.tensor_parallel, engine.draft, work)
        return {"rollout/draft_break_even_tokens": tokens}
