"""Where each process stands in the parallel layout, and what that asks of packs. Pure: imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlpipe.config.actor import ActorConfig
from rlpipe.shared.errors import ActorError
from rlpipe.shared.pack import Pack, PackFrame, dummy_pack
from rlpipe.shared.pack_multiples import pack_multiple, sequence_multiple


@dataclass(frozen=True)
class RankPlace:
    """The ranks of one process in its tensor-, context-, data- and pipeline-parallel groups."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class ActorLayout:
    """Sizes of the parallel groups. Experts are spread over the context x data ranks of a stage, or over all of them
    with the tensor ranks too; that does not change which data a process sees."""

    processes: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int
    sequence_parallel: bool
    virtual_pipeline: int | None

    @classmethod
    def of(cls, actor: ActorConfig) -> "ActorLayout":
        """The layout that `actor` describes."""
        parallel = actor.parallel
        return cls(
            processes=actor.processes,
            tensor_parallel=parallel.tensor,
            pipeline_parallel=parallel.pipeline,
            context_parallel=parallel.context,
            expert_parallel=parallel.expert,
            sequence_parallel=parallel.sequence,
            virtual_pipeline=parallel.virtual_pipeline,
        )

    @property
    def data_parallel(self) -> int:
        """Ranks that hold different packs."""
        return self.processes // (self.tensor_parallel * self.context_parallel * self.pipeline_parallel)

    @property
    def sequence_multiple(self) -> int:
        """The padded length of every sequence is a multiple of this: each context rank holds two equal pieces."""
        return sequence_multiple(self.context_parallel)

    @property
    def pack_multiple(self) -> int:
        """`Pack.padded_tokens` is a multiple of this: with sequence parallelism the tensor ranks share a context
        rank's tokens evenly. Lengthen the last sequence to reach it."""
        return pack_multiple(self.context_parallel, self.tensor_parallel, self.sequence_parallel)

    def filled(self, packs: Sequence[Pack]) -> list[Pack]:
        """`packs` and as many dummy packs as the pipeline schedule asks for: the interleaved one takes packs in groups
        of one per stage."""
        group = self.pipeline_parallel if self.virtual_pipeline else 1
        return [*packs, *[dummy_pack(self.pack_multiple)] * (-len(packs) % group)]

    def place(self, rank: int) -> RankPlace:
        """Megatron's rank order: tensor fastest, then context, data, pipeline."""
        rest, tensor = divmod(rank, self.tensor_parallel)
        rest, context = divmod(rest, self.context_parallel)
        pipeline, data = divmod(rest, self.data_parallel)
        return RankPlace(tensor, context, data, pipeline)

    def stage(self, layer: int, layers: int) -> int:
        """The pipeline stage of decoder layer `layer` of `layers`: with a virtual pipeline stages take turns."""
        chunks = self.pipeline_parallel * (self.virtual_pipeline or 1)
        return layer // (layers // chunks) % self.pipeline_parallel

    @property
    def reporting_ranks(self) -> tuple[int, ...]:
        """Per data rank, the process that holds its losses and log-probabilities: last stage, tensor and context 0."""
        last = self.pipeline_parallel - 1
        places = {self.place(rank): rank for rank in range(self.processes)}
        return tuple(places[RankPlace(0, 0, data, last)] for data in range(self.data_parallel))

    def check_packs(self, packs_by_data_rank: Sequence[Sequence[PackFrame]], what: str) -> None:
        """Raise ActorError unless every data rank has the same number of packs and each pack fits the layout.

        Ranks that exchange data (gradients, experts, pipeline stages) would wait for each other forever otherwise.
        """
        if len(packs_by_data_rank) != self.data_parallel:
            raise ActorError(
                f"{what}: packs for {len(packs_by_data_rank)} data-parallel ranks were given, the layout has "
                f"{self.data_parallel}: plan packs with ActorLayout.data_parallel"
            )
        counts = [len(packs) for packs in packs_by_data_rank]
        if min(counts) != max(counts) or not counts[0]:
            raise ActorError(
                f"{what}: data-parallel ranks have {counts} packs; every rank needs the same number, at least one: "
                "fill short ranks with rlpipe.shared.pack.dummy_pack(ActorLayout.pack_multiple)"
            )
        multiples = self.sequence_multiple, self.pack_multiple  # looked for once, not for each of many packs
        for data_rank, packs in enumerate(packs_by_data_rank):
            for index, pack in enumerate(packs):
                if problem := _problem_of(pack, *multiples):
                    raise ActorError(f"{what}: pack {index} of data-parallel rank {data_rank} {problem}")

    def check_reference(self, packs: Sequence[PackFrame], what: str) -> None:
        """Raise ActorError if a pack with samples lacks reference log-probabilities."""
        for pack in packs:
            if pack.sample_ids and pack.ref_logprobs is None:
                raise ActorError(
                    f"{what}: the KL term needs reference log-probabilities, but the pack of {pack.sample_ids[0]} has "
                    "none: run ActorGroup.logprobs with which='reference' first"
                )


def _problem_of(pack: PackFrame, sequence_multiple: int, pack_multiple: int) -> str:
    """Empty where there is none."""
    ends = pack.cu_seqlens_padded
    if any([end % sequence_multiple for end in ends]):
        uneven = [b - a for a, b in zip(ends, ends[1:], strict=False) if (b - a) % sequence_multiple]
        return (
            f"has a sequence of {uneven[0]} padded tokens, not a multiple of ActorLayout.sequence_multiple = "
            f"{sequence_multiple}: pad sequences to it"
        )
    if not ends[-1] or ends[-1] % pack_multiple:
        return (
            f"has {ends[-1]} padded tokens, not a positive multiple of ActorLayout.pack_multiple = "
            f"{pack_multiple}: lengthen its last sequence"
        )
    return ""
