"""Folders of checkpoints: published whole, checked when read, retained, set aside."""

import json
import os

import pytest

from rlpipe.shared.checkpoint_folder import (
    checkpoint_path,
    complete_checkpoints,
    damaged_files,
    file_checksum,
    latest_checkpoint,
    named_checkpoint,
    partial_path,
    publish,
    read_state,
    set_aside,
    unfinished_checkpoints,
)
from rlpipe.shared.errors import CheckpointError, DamagedCheckpointError


def _save(folder, iteration, keep=9):
    final = checkpoint_path(folder, iteration)
    partial = partial_path(final)
    (partial / "sub").mkdir(parents=True)
    (partial / "weights").write_bytes(os.urandom(3000))
    (partial / "sub" / "more").write_bytes(b"more" * iteration)
    publish(partial, final, {"iteration": iteration, "driver": {"epoch": 0}}, keep)
    return final


def test_every_flipped_bit_of_every_file_is_found(tmp_path):
    final = _save(tmp_path, 1)
    files = [path for path in final.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        content = path.read_bytes()
        for place in {0, 1, len(content) // 3, len(content) // 2, len(content) - 1}:
            for bit in (1, 128):
                damaged = bytearray(content)
                damaged[place] ^= bit
                path.write_bytes(damaged)
                assert _is_found_damaged(final), (path.name, place, bit)
        path.write_bytes(content)
    assert not _is_found_damaged(final)


def _is_found_damaged(final):
    try:
        state = read_state(final)
    except DamagedCheckpointError:
        return True
    return bool(damaged_files(final, state, state["files"]))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"files": 3, "format": 2}', "[" * 5000, "\x00" * 50])
def test_a_damaged_state_is_one_sentence(tmp_path, text):
    final = _save(tmp_path, 1)
    (final / "state.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"state.json is damaged \(.*\): use another checkpoint"):
        read_state(final)


def test_another_format_is_not_called_damaged(tmp_path):
    final = _save(tmp_path, 1)
    state = json.loads((final / "state.json").read_text())
    (final / "state.json").write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(CheckpointError, match="has checkpoint format 1; this version of rlpipe reads 2") as error:
        read_state(final)
    assert not isinstance(error.value, DamagedCheckpointError)


def test_the_newest_are_kept_and_what_is_set_aside_does_not_count(tmp_path):
    for iteration in (1, 2, 3):
        _save(tmp_path, iteration, keep=2)
    assert [path.name[-1] for path in complete_checkpoints(tmp_path)] == ["2", "3"]
    hidden = set_aside(latest_checkpoint(tmp_path), "damaged")
    assert hidden.name == ".iteration_00000003.damaged"
    assert [path.name[-1] for path in complete_checkpoints(tmp_path)] == ["2"]
    _save(tmp_path, 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [hidden.name, "iteration_00000003"]


def test_checkpoints_have_names(tmp_path):
    final = _save(tmp_path, 12)
    assert named_checkpoint(tmp_path, "12") == named_checkpoint(tmp_path, "iteration_00000012") == final
    for name in ("13", "../x", "", "9" * 300):
        with pytest.raises(CheckpointError, match="no complete checkpoint .*; there are: iteration_00000012"):
            named_checkpoint(tmp_path, name)


def test_an_interrupted_save_is_seen(tmp_path):
    _save(tmp_path, 1)
    partial = partial_path(checkpoint_path(tmp_path, 2))
    partial.mkdir()
    assert unfinished_checkpoints(tmp_path) == [partial]
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1)


def test_a_checksum_is_that_of_the_whole_content(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(9 * 2**20))
    whole = file_checksum(path)
    path.write_bytes(bytes(9 * 2**20 - 1) + b"\x01")
    assert file_checksum(path) != whole
