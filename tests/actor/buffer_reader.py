"""The engine's side of shared buffers, without an engine."""

import pickle
import time
from pathlib import Path
from typing import Any

from rlpipe.shared.weights import WeightBucket, checksum
from rollout.weights.sources import SharedBuffers


def read_buckets(plan: tuple[WeightBucket, ...], source: SharedBuffers) -> tuple[dict[str, Any], tuple[str, ...]]:
    """One round of buckets: the tensors by name as float32 arrays, and the checksums of the buckets."""
    tensors, sums = {}, []
    for bucket, flat in zip(plan, source.buckets(plan), strict=True):
        here = flat.to("cpu", copy=True)
        sums.append(checksum(here.numpy().data))
        pieces = zip(bucket.tensors, bucket.pieces(here), strict=True)
        tensors |= {spec.name: piece.float().numpy() for spec, piece in pieces}
    return tensors, tuple(sums)


def invite(letter: Path, address: str, plan: tuple[WeightBucket, ...]) -> None:
    """The sender's side: leave word for the reader that waits for the file `letter`."""
    draft = letter.with_suffix(".draft")
    draft.write_bytes(pickle.dumps((address, plan)))
    draft.rename(letter)


def accept(letter: Path, device: str, timeout_seconds: float = 120) -> tuple[SharedBuffers, tuple[WeightBucket, ...]]:
    """Wait for the sender's word and open its buffers."""
    end = time.monotonic() + timeout_seconds
    while not letter.exists():
        assert time.monotonic() < end, f"no sender wrote {letter}"
        time.sleep(0.02)
    address, plan = pickle.loads(letter.read_bytes())
    return SharedBuffers(address, device), plan


def read_rounds(letters: dict[str, Path], device: str, rounds: int = 2) -> dict[str, Any]:
    """By name, what the rounds of the senders bring that leave word in `letters`, one after another."""
    results = {}
    for name, letter in letters.items():
        source, plan = accept(letter, device)
        results[name] = [read_buckets(plan, source) for _ in range(rounds)]
        source.leave()
    return results
