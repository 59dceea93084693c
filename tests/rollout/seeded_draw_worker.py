"""Draws rows together and alone with SGLang's sampler, in a process of its own; prints the tokens as JSON.

Where SGLang's hash is a Triton kernel, one of the same arguments stands in for it, since this runs on a CPU.
"""

import json
from types import SimpleNamespace

import torch
from sglang.kernels.ops.sampling import murmur_hash
from sglang.srt.layers import sampler

from rollout.sglang_patches import seeded_draw

ROWS, VOCABULARY = 64, 3000
FILTERS = ((VOCABULARY, 1.0), (20, 0.8), (VOCABULARY, 0.5), (1, 1.0))
"""top_k and top_p of rows in turn; the first is plain, the last greedy."""


def main() -> None:
    murmur_hash.murmur_hash32 = hashes
    sampler.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    seeded_draw.install()
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(ROWS, VOCABULARY, generator=generator) * 2, dim=-1)
    together = draw(probs, list(range(ROWS)))
    alone = [draw(probs, [row])[0] for row in range(ROWS)]
    ranks = [int((probs[row] > probs[row, token]).sum()) for row, token in enumerate(together)]
    print(json.dumps({"together": together, "alone": alone, "ranks": ranks}))


def hashes(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    rows = [torch.Generator().manual_seed(one) for one in (seed.to(torch.int64) * 1000 + positions).tolist()]
    return torch.stack([torch.randint(0, 2**32, columns.shape, generator=row) for row in rows])


def draw(probs: torch.Tensor, rows: list[int]) -> list[int]:
    filters = [FILTERS[row % len(FILTERS)] for row in rows]
    simple = all(one == FILTERS[0] for one in filters)
    info = SimpleNamespace(
        sampling_seed=torch.tensor(rows),
        top_ks=torch.tensor([top_k for top_k, _ in filters]),
        top_ps=torch.tensor([top_p for _, top_p in filters]),
        min_ps=torch.zeros(len(rows)),
        need_min_p_sampling=False,
    )
    positions = torch.tensor(rows) + 7
    return sampler.Sampler._sample_from_probs(None, probs[rows].clone(), info, positions, simple).tolist()


if __name__ == "__main__":
    main()
