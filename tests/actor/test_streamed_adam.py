"""Adam over states of host memory that pass through few slots of device memory, against torch's AdamW."""

import pytest
import torch

from actor import streamed_adam, transfer_stream
from actor.streamed_adam import StreamedAdam
from actor.transfer_stream import copy_converted

GROUPS = (
    {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.0},
)
SIZES = ((48, 16, 80), (32, 16))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parameters(dtype: torch.dtype, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes] for sizes in SIZES]


def gradients(step: int, owners: list[list[torch.Tensor]]) -> dict[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {owner: torch.randn(owner.shape, generator=generator).to(DEVICE) for group in owners for owner in group}


def opened(owners, chunk_elements=32, moments=torch.float32) -> StreamedAdam:
    adam = StreamedAdam(owners, moments, chunk_elements)
    for group in owners:
        for owner in group:
            adam.host_views(owner)[0].copy_(owner)
    return adam


def by_torch(owners, steps: int) -> list[torch.Tensor]:
    masters = [[owner.float().clone() for owner in group] for group in owners]
    adam = torch.optim.AdamW(
        [{**settings, "params": group} for settings, group in zip(GROUPS, masters, strict=True)], fused=True
    )
    for step in range(steps):
        found = gradients(step, owners)
        for group, of in zip(owners, masters, strict=True):
            for owner, master in zip(group, of, strict=True):
                master.grad = found[owner]
        adam.step()
    return [master for group in masters for master in group]


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_slots_gives_the_update_of_torch(slots, dtype):
    owners = parameters(dtype)
    wanted = by_torch(owners, steps=4)
    adam = opened(owners)
    for step in range(4):
        adam.reserve(slots)
        assert adam.slots == min(slots, 7)
        adam.staying_slots = adam.slots // 2
        adam.prefetch()
        adam.step(step, GROUPS, gradients(step, owners).__getitem__)
    adam.finish()
    flat = [owner for group in owners for owner in group]
    for owner, master in zip(flat, wanted, strict=True):
        assert torch.equal(adam.host_views(owner)[0].to(DEVICE), master)
        assert torch.equal(owner, master.to(dtype))
    assert adam.slots == min(max(slots, 2), 7)
    adam.close()
    assert adam.slots == 0


def test_parameters_come_back_from_their_masters_and_training_goes_on():
    kept, freed = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, other = opened(kept), opened(freed)
    for step in range(5):
        one.step(step, GROUPS, gradients(step, kept).__getitem__)
        other.step(step, GROUPS, gradients(step, freed).__getitem__)
        other.staying_slots = step // 2
        other.release(step)  # from nothing to almost everything stays on the device
        for group in freed:
            for owner in group:
                owner.zero_()
        other.restore_parameters()
        for group, of in zip(kept, freed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(group, of, strict=True))
    one.finish()
    other.finish()
    assert all(torch.equal(a, b) for a, b in zip(one.states.parts, other.states.parts, strict=True))


@pytest.mark.parametrize("slots_left", [0, 2])
def test_what_only_slots_hold_is_downloaded_before_they_go(slots_left):
    owners, others = parameters(torch.float32), parameters(torch.float32)
    plain, staying = opened(owners), opened(others)
    staying.reserve(99)
    staying.staying_slots = 99
    for step in range(2):
        plain.step(step, GROUPS, gradients(step, owners).__getitem__)
        staying.step(step, GROUPS, gradients(step, others).__getitem__)
    plain.finish()
    assert not torch.equal(plain.states.master, staying.states.master)
    staying.release(slots_left)
    if slots_left:
        staying.close()
    assert staying.slots == 0
    assert all(torch.equal(a, b) for a, b in zip(plain.states.parts, staying.states.parts, strict=True))


def test_a_full_device_is_said_where_not_even_the_least_fits(monkeypatch):
    owners = parameters(torch.bfloat16)
    adam = opened(owners)
    adam.reserve(1)
    adam.prefetch()
    monkeypatch.setattr(streamed_adam, "_Slot", full_device)
    adam.reserve(3)  # what there is no room for is done without
    assert adam.slots == 1
    with pytest.raises(torch.OutOfMemoryError):
        adam.restore_parameters()
    with pytest.raises(torch.OutOfMemoryError):
        adam.step(0, GROUPS, gradients(0, owners).__getitem__)


def full_device(*_: object) -> None:
    raise torch.OutOfMemoryError


def test_moments_in_bfloat16_are_rounded_after_an_update_in_float32():
    owners, half = parameters(torch.float32), parameters(torch.float32)
    full, rounded = opened(owners), opened(half, moments=torch.bfloat16)
    full.step(0, GROUPS, gradients(0, owners).__getitem__)
    rounded.step(0, GROUPS, gradients(0, half).__getitem__)
    full.finish()
    rounded.finish()
    assert torch.equal(full.states.master, rounded.states.master)
    assert torch.equal(full.states.exp_avg.bfloat16(), rounded.states.exp_avg)
    assert torch.equal(full.states.exp_avg_sq.bfloat16(), rounded.states.exp_avg_sq)


def test_what_was_changed_on_the_host_is_uploaded_anew():
    owners = parameters(torch.float32)
    adam = opened(owners)
    adam.reserve(99)
    adam.step(0, GROUPS, gradients(0, owners).__getitem__)
    adam.finish()
    adam.states.master.fill_(2.0)
    adam.forget()
    adam.restore_parameters()
    assert all(bool((owner == 2.0).all()) for group in owners for owner in group)


@pytest.mark.parametrize("elements", [1, 7, 8, 50])
def test_values_are_converted_in_pieces_and_none_is_left_out(monkeypatch, elements):
    monkeypatch.setattr(transfer_stream, "_CONVERTED_ELEMENTS", 7)
    source = torch.arange(elements, dtype=torch.float32).to(torch.bfloat16)
    target = torch.full((elements + 1,), -1.0)
    copy_converted(source, target[:elements])
    assert target.tolist() == [*source.tolist(), -1.0]
