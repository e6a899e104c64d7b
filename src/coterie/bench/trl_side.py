"""TRL's side of ``coterie bench round``; run by the interpreter of ``.venv-bench``, so nothing of coterie is imported.

``python trl_side.py SETTINGS.json``: TRL's own training loop runs unmodified. After each optimiser step a callback answers on
stdout and waits for the next command on stdin (JSON lines): ``{"do": "round"}`` samples and trains, ``{"do": "update"}``
trains on the fixed batch in place of what it would have sampled, ``{"do": "stop"}`` ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Side(TrainerCallback):  # type: ignore[misc]
    """Times the trainer between commands."""

    def __init__(self, settings: dict[str, Any], channel: Any) -> None:
        self.settings = settings
        self.channel = channel
        self.command: dict[str, Any] = {}
        self.loss = self.grad_norm = self.rollout_s = self.rollout_cpu_s = self.started = self.started_cpu = 0.0
        self.tokens = 0
        self.prompt_tokens: list[int] = []

    def attach(self, trainer: Any) -> None:
        generate, compute, clip = (
            trainer._generate_and_score_completions,
            trainer._compute_loss,
            trainer.accelerator.clip_grad_norm_,
        )

        def timed_generate(inputs: Any) -> Any:
            if self.command["do"] == "update":
                return fixed_batch(self.settings["batch"])
            start, cpu = time.perf_counter(), time.process_time()
            out = generate(inputs)
            self.rollout_s, self.rollout_cpu_s = time.perf_counter() - start, time.process_time() - cpu
            self.tokens = int(out["completion_mask"].sum())
            self.prompt_tokens = sorted(out["prompt_mask"].sum(1).tolist())[:: self.settings["group_size"]]
            return out

        def summed_loss(model: Any, inputs: Any) -> Any:
            loss = compute(model, inputs)
            self.loss += float(loss.detach())
            return loss

        def kept_norm(*args: Any, **kw: Any) -> Any:
            norm = clip(*args, **kw)
            self.grad_norm = float(norm)
            return norm

        trainer._generate_and_score_completions = timed_generate
        trainer._compute_loss = summed_loss
        trainer.accelerator.clip_grad_norm_ = kept_norm

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self.answer({"ready": True})
        self.next(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        self.loss = self.rollout_s = self.rollout_cpu_s = 0.0
        self.started, self.started_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        seconds, cpu = time.perf_counter() - self.started, time.process_time() - self.started_cpu
        self.answer(
            {
                "seconds": seconds,
                "cpu_s": cpu,
                "rollout_s": self.rollout_s,
                "rollout_cpu_s": self.rollout_cpu_s,
                "tokens": self.tokens,
                "prompt_tokens": self.prompt_tokens,
                "loss": self.loss,
                "grad_norm": self.grad_norm,
            }
        )
        self.next(control)

    def answer(self, values: dict[str, Any]) -> None:
        print("command", self.command, "answer", values, file=sys.stderr, flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.channel.write(json.dumps(values | {"peak_mb": peak}) + "\n")
        self.channel.flush()

    def next(self, control: Any) -> None:
        line = sys.stdin.readline()
        self.command = json.loads(line) if line else {"do": "stop"}
        control.should_training_stop = self.command["do"] == "stop"


def fixed_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as ``_generate_and_score_completions`` returns it: prompts padded left, completions right."""
    longest_prompt = max(map(len, batch["prompts"]))
    longest = max(map(len, batch["completions"]))
    rows = len(batch["prompts"])
    out = {
        "prompt_ids": torch.zeros(rows, longest_prompt, dtype=torch.long),
        "prompt_mask": torch.zeros(rows, longest_prompt, dtype=torch.long),
        "completion_ids": torch.zeros(rows, longest, dtype=torch.long),
        "completion_mask": torch.zeros(rows, longest, dtype=torch.long),
        "old_per_token_logps": torch.zeros(rows, longest),
        "advantages": torch.tensor(batch["advantages"]),
    }
    for i, (p, c, old) in enumerate(zip(batch["prompts"], batch["completions"], batch["old_logprobs"], strict=True)):
        out["prompt_ids"][i, longest_prompt - len(p) :] = torch.tensor(p)
        out["prompt_mask"][i, longest_prompt - len(p) :] = 1
        out["completion_ids"][i, : len(c)] = torch.tensor(c)
        out["completion_mask"][i, : len(c)] = 1
        out["old_per_token_logps"][i, : len(c)] = torch.tensor(old)
    out["num_items_in_batch"] = out["completion_mask"].sum()
    return out


def alternating(completions: list[Any], **kw: Any) -> list[float]:
    """Rewards that make every group informative."""
    return [float(i % 2) for i in range(len(completions))]


def main(settings: dict[str, Any], channel: Any) -> None:
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    prompts = settings["prompts"]
    if tokenizer.chat_template:
        prompts = [[{"role": "user", "content": p}] for p in prompts]
    rows = settings["rows"]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=rows // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        learning_rate=settings["lr"],
        temperature=1.0,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=settings["checkpointing"],
        max_steps=10_000,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
    )
    side = Side(settings, channel)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=alternating,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[side],
    )
    side.attach(trainer)
    trainer.train()


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), replies)
