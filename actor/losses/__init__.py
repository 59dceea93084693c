"""Losses: plain functions from the tensors of one pack to a loss per token.

    def name(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput: ...

`actor.losses.loss_registry` knows them by name; `actor.losses.objective` adds the KL and entropy terms and the metrics
that all losses share.
"""
