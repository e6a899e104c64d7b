"""Train the model `tiny` and write it to src/coterie/models/tiny.

    OMP_NUM_THREADS=1 python scripts/build_tiny.py --out src/coterie/models/tiny

Everything is seeded: the same machine and library versions give the same weights. Problems come from the training split
of the tasks in src/coterie/models/tiny_tasks.toml. A model of another size and another tokenizer, for swarms whose nodes
differ (experiments/sharing_mixed.toml):

    OMP_NUM_THREADS=1 python scripts/build_tiny.py --out runs/tiny_pairs --layers 3 --width 96 --tokenizer pairs \
        --tasks letter_counting,simple_equations,products,gcd --steps 500 --noisy-steps 150
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from tiny.data import Source, all_sources
from tiny.fit import Plan, Trainer, batches
from tiny.measure import pass_rates
from tiny.net import check_same, make_model
from tiny.tokens import PAIRS, fixed_phrases, make_tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PHRASE_SHARE = {"color_cube_rotation": 0.07}  # a phrase must stand in this share of a task's prompts; else 0.3
SLIP = {  # share of a task's training answers with a wrong step in the noisy part: the better it is known, the more
    "chain_sum": 0.15,
    "products": 0.6,
    "simple_equations": 0.5,
    "spell_backward": 0.6,
    "letter_counting": 0.5,
    "word_sorting": 0.35,
    "family_relationships": 0.3,
    "ab": 0.55,
    "color_cube_rotation": 0.1,
    "gcd": 0.45,
    "prime_factorization": 0.25,
    "count_bits": 0.45,
}
WEIGHT = {
    "chain_sum": 1.5,
    "simple_equations": 1.5,
    "prime_factorization": 1.3,
    "letter_counting": 0.7,
    "count_bits": 0.7,
}  # share of rows, relative to the others; else 1
POOL = 20_000  # problems drawn per task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--tasks", default="", help="only these tasks, comma-separated; else all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=128, help="a multiple of 8; four heads, MLP of three times the width"
    )
    parser.add_argument(
        "--tokenizer", choices=("phrases", "pairs"), default="phrases", help="pairs: two digits a token"
    )
    parser.add_argument("--steps", type=int, default=1900, help="steps on right answers")
    parser.add_argument("--noisy-steps", type=int, default=500, help="then, steps on answers that slip")
    parser.add_argument("--clean", type=Path, help="state after the first part: read if it exists, else written")
    parser.add_argument("--rows", type=int, default=64, help="answers per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--problems", type=int, default=200, help="held-out problems per task for the table at the end")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()

    sources = all_sources([name for name in args.tasks.split(",") if name])
    pool = {name: source.items("train", POOL, f"train/{args.seed}") for name, source in sources.items()}
    phrases = [
        phrase
        for name, items in pool.items()
        for phrase in fixed_phrases([item["question"] for item in items[:2000]], PHRASE_SHARE.get(name, 0.3))
    ]
    tokenizer = make_tokenizer([*phrases, *PAIRS] if args.tokenizer == "pairs" else phrases)
    model = make_model(tokenizer, args.layers, args.width)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{count:,} parameters, {len(tokenizer)} tokens, problems { ({k: len(v) for k, v in pool.items()}) }",
        flush=True,
    )

    weight = {t: WEIGHT.get(t, 1.0) for t in pool}
    plan = Plan(args.steps, args.noisy_steps, args.rows, args.lr, args.matrix_lr, SLIP, weight, seed=args.seed)
    trainer = Trainer(model, plan)
    if args.clean and args.clean.exists():
        trainer.load(torch.load(args.clean, weights_only=True))
    else:
        trainer.run(batches(plan, pool, tokenizer, noisy=False))
        if args.clean:
            torch.save(trainer.state(), args.clean)
            table(model, tokenizer, sources, args.problems // 4)
    trainer.run(batches(plan, pool, tokenizer, noisy=True))
    save(model, tokenizer, args.out)
    print(f"trained in {time.monotonic() - started:.0f} s; sha256 {digest(args.out)}", flush=True)
    table(model, tokenizer, sources, args.problems)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    check_same(model, torch.arange(40).view(1, 40) % len(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def table(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sources: dict[str, Source], problems: int
) -> None:
    """Print pass rates on held-out problems as a Markdown table."""
    print(
        "| task | pass@1 | pass@8 | greedy | informative | prompt | answer median | max |\n|---|---|---|---|---|---|---|---|"
    )
    rows = {n: pass_rates(model, tokenizer, s, s.items("eval", problems, "measure")) for n, s in sources.items()}
    for name, r in rows.items():
        print(
            f"| {name} | {r['pass@1']:.2f} | {r['pass@8']:.2f} | {r['greedy']:.2f} | {r['informative']:.2f} "
            f"| {r['prompt']:.0f} | {r['answer_median']} | {r['answer_max']} |"
        )
    print(json.dumps({n: round(r["pass@1"], 4) for n, r in rows.items()}))


if __name__ == "__main__":
    main()
