"""Losses: registered plain functions from the tensors of one pack to a loss per token.

    @register_loss("name")
    def name(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput: ...

`actor.losses.objective` adds the KL and entropy terms and the metrics that all losses share.
"""

import actor.losses.clipped
import actor.losses.clipped_variants  # noqa: F401
