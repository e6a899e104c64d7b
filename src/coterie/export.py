"""``coterie export``: a folder ready for a model hub. Model, tokenizer, config, results, merge receipt, and a model card.

Nothing is uploaded and no account is needed; the command that uploads the folder is printed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from coterie.config import Config, load_config
from coterie.errors import CoterieError, UserError
from coterie.merging.receipt import RECEIPT, model_card
from coterie.models import folder_of
from coterie.rundir import read_jsonl

# Settings that say something about the machine or the swarm they were used in, not about the model.
PRIVATE = {
    "": ("run_dir",),
    "swarm": ("identity", "path", "connect", "listen", "allow", "invite_file", "tls_ca", "tls_certificate", "tls_key", "user",
              "password_file"),
    "helpers.roles": ("url", "key_env", "extra_body"),
}  # fmt: skip


def export(source: Path, out: Path, name: str = "", results: Sequence[Path] = ()) -> Path:
    """Write ``out`` from a finished run directory or a merged model, whole or not at all. Returns ``out``.

    Args:
        results: files written by ``coterie eval --json``; they go into the card and into the folder.

    Raises:
        UserError: ``source`` is neither, a file of ``results`` is no evaluation, or ``out`` exists.
        CoterieError: the disk refuses.
    """
    model = Path(folder_of(source))
    if not (model / "config.json").is_file() or not list(model.glob("*.safetensors")):
        raise UserError(f"{source}: neither a finished run nor a folder with a model")
    if out.exists():
        raise UserError(f"--out {out}: exists already; choose another name")
    evaluations = [(p, _evaluation(p)) for p in results]
    part = out.with_name(f".{out.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(model, part, ignore=shutil.ignore_patterns(".*", RECEIPT))
        card = _run_documents(source, part, name or out.name) if model != source else _merge_card(model, part)
        for path, found in evaluations:
            card += "\n" + _pass_table(found)
            shutil.copyfile(path, part / path.name)
        (part / "README.md").write_text(card, encoding="utf-8")
        part.rename(out)
    except OSError as e:
        raise CoterieError(f"{out}: cannot write ({e.strerror})") from e
    return out


def _run_documents(run: Path, folder: Path, name: str) -> str:
    """Config, figures and (for a model trained on from a merge) the receipt into ``folder``; returns the card's text."""
    cfg = load_config(run / "config.toml")
    shutil.copyfile(run / "metrics.jsonl", folder / "metrics.jsonl")
    (folder / "coterie.toml").write_text(public_config(cfg), encoding="utf-8")
    receipt = _receipt(Path(cfg.model.name), folder)
    rows = list(read_jsonl(run / "metrics.jsonl"))
    parts = [_head(name, cfg), _training(cfg, rows), _results(cfg, rows)]
    if receipt is not None:
        parts.append(_merge(receipt))
    changed = public_config(cfg, defaults=False)
    parts.append(
        f"## Config\n\nWhat differs from the defaults; all of it is in `coterie.toml`.\n\n```toml\n{changed}```\n"
    )
    return "\n".join(parts)


def _merge_card(model: Path, folder: Path) -> str:
    receipt = _receipt(model, folder)
    if receipt is None:
        raise UserError(
            f"{model}: no {RECEIPT} there, and it is no run directory, so nothing is known about this model"
        )
    return model_card(receipt, adapter=False)


def _receipt(model: Path, folder: Path) -> dict[str, Any] | None:
    """The merge receipt of ``model``, if it has one, copied into ``folder`` without this machine's paths."""
    file = model / RECEIPT
    if not file.is_file():
        return None
    facts: dict[str, Any] = _without_paths(json.loads(file.read_text(encoding="utf-8")))
    facts["command"] = ""
    (folder / RECEIPT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {_without_paths(k): _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "./", "../", "~", "runs/")) else value


def public_config(cfg: Config, *, defaults: bool = True) -> str:
    """The config as TOML without :data:`PRIVATE` settings; ``defaults=False``: only what differs from the defaults."""
    data = cfg.model_dump(mode="json", exclude_defaults=not defaults)
    for section, keys in PRIVATE.items():
        for table in _tables(data, section):
            for key in keys:
                table.pop(key, None)
    return tomli_w.dumps(data)


def _tables(data: dict[str, Any], section: str) -> Iterator[dict[str, Any]]:
    if section == "helpers.roles":
        yield from data.get("helpers", {}).get("roles", {}).values()
    else:
        yield data.get(section, {}) if section else data


def _head(name: str, cfg: Config | None) -> str:
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["coterie", "reinforcement-learning"],
    }
    lines = [f"{k}: {json.dumps(v)}" for k, v in front.items()]
    base = cfg.model.name if cfg else ""
    if base.count("/") == 1 and not Path(base).exists():  # a hub id
        lines.append(f"base_model: {json.dumps(base)}")
    note = (
        "Trained on problems whose answers a program can check, and evaluated on those alone: nothing is known about its safety "
        "or its other abilities. The licence of the base model applies; add it above before you publish."
    )
    return "\n".join(["---", *lines, "---", "", f"# {name}", "", note, ""])


def _training(cfg: Config, rows: list[dict[str, Any]]) -> str:
    steps = max(r["step"] for r in rows)
    tokens = sum(r.get("tokens/generated", 0) for r in rows)
    what = (
        "Supervised training on worked answers"
        if cfg.method == "sft"
        else "Reinforcement learning with verifiable rewards"
    )
    items = [
        f"{what}, coterie: {steps} steps from `{Path(cfg.model.name).name}`, seed {cfg.seed}",
        f"{cfg.rollout.problems} problems x {cfg.rollout.group_size} answers a step; {tokens:,.0f} tokens generated",
        f"advantage `{cfg.advantage.kind}`, loss `{cfg.loss.kind}`, AdamW with learning rate {cfg.optim.lr:g}",
        f"LoRA of rank {cfg.model.lora_rank}, merged into the weights"
        if cfg.model.lora_rank
        else "all weights trained",
    ]
    if cfg.swarm.exchange != "none":
        used = sum(r.get("update/peer_groups", 0) for r in rows)
        items.append(f"{used:.0f} groups of other nodes were trained on too (`peer_loss = {cfg.loss.peer_loss}`)")
    if cfg.helpers.roles:
        asked = ", ".join(cfg.helpers.roles)
        items.append(
            f"in training it could ask helpers ({asked}; `external_loss = {cfg.loss.external_loss}`); not in the results below"
        )
    return "## Training\n\n" + "\n".join(f"- {i}" for i in items) + "\n"


def _results(cfg: Config, rows: list[dict[str, Any]]) -> str:
    scored = [r for r in rows if "eval/accuracy" in r]
    if not scored:
        return "## Results\n\nThe run held no evaluation.\n"
    first, last = scored[0], scored[-1]
    e = cfg.eval
    table = ["| task | before | after | 95% interval | tokens per answer | truncated |", "|---|---|---|---|---|---|"]
    for task in cfg.tasks:
        at = f"eval/{task}"
        if f"{at}/accuracy" in last:
            before = f"{first[f'{at}/accuracy']:.3f}" if f"{at}/accuracy" in first else "-"
            interval = f"{last[f'{at}/low']:.3f} to {last[f'{at}/high']:.3f}"
            end = f"{last[f'{at}/length']:.1f} | {last[f'{at}/truncated']:.0%}"
            table.append(f"| {task} | {before} | {last[f'{at}/accuracy']:.3f} | {interval} | {end} |")
    note = (
        f"Sampled pass@1 on {e.problems} held-out problems a task, {e.samples} answers to each, temperature "
        f"{cfg.rollout.temperature:g}, at most {cfg.rollout.max_new_tokens} tokens, "
        f"at step {first['step']} and step {last['step']}. One seed."
    )
    return "## Results\n\n" + note + "\n\n" + "\n".join(table) + "\n"


def _merge(receipt: dict[str, Any]) -> str:
    recipe = receipt["recipe"]
    experts = ", ".join(f"{e['label']} (weight {e['weight']:g})" for e in recipe["experts"])
    return (
        f"## Merge\n\nThe model it started from was merged: method `{recipe['method']}`, lambda {recipe['lambda']:g}, of "
        f"{experts}. {recipe['formula']}. Hashes of all inputs, norms and rounding: `{RECEIPT}`.\n"
    )


def _evaluation(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _pass_table(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"--results {path}: not a file written by `coterie eval --json` ({type(e).__name__})") from e
    return dict(found)


def _pass_table(found: dict[str, Any]) -> str:
    ks = sorted({int(k) for t in found["tasks"].values() for k in t["pass"]})
    table = [
        "| task | " + " | ".join(f"pass@{k}" for k in ks) + " | 95% interval (pass@1) | problems |",
        "|---" * (len(ks) + 3) + "|",
    ]
    for task, t in found["tasks"].items():
        passes = " | ".join(f"{t['pass'][str(k)]:.3f}" if str(k) in t["pass"] else "-" for k in ks)
        table.append(f"| {task} | {passes} | {t['interval95'][0]:.3f} to {t['interval95'][1]:.3f} | {t['problems']} |")
    settings = ", ".join(f"{k} {v}" for k, v in found["settings"].items())
    return f"## Evaluation of {Path(found['model']).name}\n\n" + "\n".join(table) + f"\n\nSettings: {settings}.\n"
