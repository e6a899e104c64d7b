import json
import shutil

import pytest
import torch

from coterie.checkpoint import Checkpoint, load_checkpoint, load_latest, save_checkpoint
from coterie.errors import CoterieError


def make(step):
    return Checkpoint(step, {"w": torch.full((3,), float(step))}, {"m.w": torch.ones(3)}, {"n": step})


def latest(folder):
    notes = []
    return load_latest(folder, notes.append), notes


def test_round_trip_and_keep(tmp_path):
    for s in (1, 2, 3):
        save_checkpoint(tmp_path, make(s), keep=2)
    found, notes = latest(tmp_path)
    assert found.step == 3 and found.state == {"n": 3} and not notes
    assert torch.equal(found.weights["w"], torch.full((3,), 3.0)) and torch.equal(found.optimizer["m.w"], torch.ones(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_ck01_half_written_is_named_and_ignored(tmp_path):
    save_checkpoint(tmp_path, make(1), keep=2)
    part = tmp_path / ".step_000002.part"
    part.mkdir()
    (part / "weights.safetensors").write_bytes(b"half")
    found, notes = latest(tmp_path)
    assert found.step == 1 and len(notes) == 1 and ".step_000002.part" in notes[0]


def test_ck01_ck03_incomplete_newest_falls_back_by_number_not_by_name(tmp_path):
    for s in (9, 10, 100):
        save_checkpoint(tmp_path, make(s), keep=9)
    (tmp_path / "step_000100" / "optimizer.safetensors").unlink()
    found, notes = latest(tmp_path)
    assert found.step == 10 and "step_000100" in notes[0] and "optimizer.safetensors missing" in notes[0]


def test_damaged_weights_are_named(tmp_path):
    save_checkpoint(tmp_path, make(1), keep=9)
    path = save_checkpoint(tmp_path, make(2), keep=9)
    (path / "weights.safetensors").write_bytes(b"\x00" * 20)
    found, notes = latest(tmp_path)
    assert found.step == 1 and "damaged" in notes[0]


def test_ck02_failed_write_keeps_the_previous_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make(1), keep=1)
    bad = Checkpoint(2, {"w": torch.ones(2)}, {"m": torch.ones(2)}, {"x": object()})  # not JSON: the last file fails
    with pytest.raises(CoterieError, match="cannot write checkpoint"):
        save_checkpoint(tmp_path, bad, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_ck07_other_format_says_so(tmp_path):
    path = save_checkpoint(tmp_path, make(1), keep=1)
    meta = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(CoterieError, match=r"format 99, this coterie reads format 1"):
        load_checkpoint(path)


def test_ck08_pickle_is_never_loaded(tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (marker.write_text, ("x",))

    path = save_checkpoint(tmp_path / "c", make(1), keep=1)
    torch.save(Evil(), path / "weights.safetensors")
    with pytest.raises(CoterieError, match="damaged or not written by coterie"):
        load_checkpoint(path)
    assert not marker.exists()


def test_foreign_folder_and_empty_folder(tmp_path):
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "none") == (None, [])
    (tmp_path / "step_000007").mkdir()
    found, notes = latest(tmp_path)
    assert found is None and "not complete" in notes[0]
    shutil.rmtree(tmp_path / "step_000007")
