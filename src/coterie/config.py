"""Typed configuration: defaults < TOML file < dotted flags (``--optim.lr 1e-4``).

An unknown key is an error that names the key, its section and the nearest known one. The resolved config is written to
the run directory. No torch is imported here.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.config_conflicts import conflicts
from coterie.errors import UserError


class Section(BaseModel):
    """Base of every config section: unknown keys are errors, values are never coerced from the wrong kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    name: str = "tiny"
    """`tiny`, `smollm2`, a Hugging Face id, or a local folder."""
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights; otherwise the rank of the LoRA adapters."""
    lora_alpha: float = Field(32.0, gt=0)
    """LoRA scale numerator (the update is alpha / rank * B A)."""
    lora_targets: str = "all-linear"
    """Comma-separated module names that get an adapter, or `all-linear`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type. Master weights are always float32."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`."""
    system_prompt: str = ""
    """System message of the chat template. Empty: none. Ignored by models without a chat template."""


class TaskConfig(Section):
    kind: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    """Where problems come from."""
    name: str = ""
    """reasoning-gym task name; empty: the key under which the task is listed."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str = ""
    """JSONL file with `prompt`, `answer` and optionally `verifier` per line (kind = "jsonl")."""
    verifier: Literal["auto", "exact", "numeric", "math", "code", "task", "task_partial"] = "auto"
    """How an answer is scored. `auto`: the task's own right/wrong (reasoning-gym) or the dataset line's verifier.
    `task_partial` opts in to the library's partial credit."""
    suffix: str = ""
    """Text appended to every prompt (for example a format instruction)."""
    weight: float = Field(1.0, ge=0)
    """Share of problems drawn from this task, relative to the others."""


class RolloutConfig(Section):
    problems: int = Field(8, ge=1)
    """Problems (= groups) rolled out per step: SAPO's I plus what is filtered."""
    group_size: int = Field(8, ge=1)
    """Trajectories per problem, G. Training needs at least 2."""
    max_new_tokens: int = Field(64, ge=1)
    """Budget of a response, helpers' words included."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are dropped and counted, never cut."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner re-scores at the same one."""
    stop: tuple[str, ...] = ()
    """Stop strings. The tokens that complete one are kept whole."""
    token_budget: int = Field(16384, ge=1)
    """Most tokens (rows x length) held in the KV cache at once."""
    resample: int = Field(0, ge=0)
    """Extra rollout rounds to replace own groups without signal (the own-group filter). 0: keep what came."""


class EngineConfig(Section):
    """What samples. `vllm` has not been run on a GPU yet."""

    kind: Literal["torch", "vllm"] = "torch"
    """`torch`: from the policy's own weights, anywhere; `vllm`: a copy in vLLM, on a GPU (extra `vllm`)."""
    gpu_memory: float = Field(0.4, gt=0, le=1)
    """vllm: share of the GPU's memory for its weights and key/value cache."""
    context: int = Field(0, ge=0)
    """vllm: most tokens of prompt and answer together. 0: the model's own limit."""
    sleep: bool = True
    """vllm: free that memory during the update."""
    eager: bool = False
    """vllm: no CUDA graphs: starts faster, decodes slower."""


class AdvantageConfig(Section):
    kind: Literal["mean_std", "mean", "rloo", "batch", "gae"] = "mean_std"
    """`mean_std` GRPO, `mean` Dr.GRPO, `rloo` leave-one-out, `batch` REINFORCE++, `gae` PPO with a value head."""
    baseline: Literal["own_mode", "solo_mean", "shared"] = "solo_mean"
    """What a trajectory is compared with when helped and solo rollouts are mixed in a group."""
    gamma: float = Field(1.0, ge=0, le=1)
    """`gae`: discount per token the policy writes."""
    lam: float = Field(0.95, ge=0, le=1)
    """`gae`: lambda; 1 takes the whole return (no bias), 0 trusts the value head one token ahead."""
    whiten: bool = True
    """`gae`: subtract the mean and divide by the deviation of the advantages over the batch's policy tokens."""
    value_clip: float = Field(0.2, gt=0)
    """`gae`: how far the value of a token may move per batch before its regression is clipped."""
    value_coef: float = Field(0.5, ge=0)
    """`gae`: weight of the value head's loss."""


class LossConfig(Section):
    kind: Literal["clip", "gspo"] = "clip"
    """`clip`: token-level PPO clip; `gspo`: one ratio per sequence (length-normalised)."""
    clip_low: float = Field(0.2, gt=0)
    """Lower clip distance: ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(0.28, gt=0)
    """Upper clip distance: ratios above 1 + clip_high are clipped."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """Divide by trained tokens, average per sequence, or divide by rows x max_new_tokens."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL estimate to the start model, in the loss, on own tokens."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """`k3`: unbiased value, gradient of KL(start || policy); `k2`: gradient of KL(policy || start)."""
    mask_truncated: bool = False
    """Leave truncated answers out of the loss."""
    external_loss: Literal["masked", "ppo_is", "surrogate", "luffy", "aipo", "ce"] = "aipo"
    """Treatment of helpers' tokens. `masked` learns to use help, not to do without it."""
    peer_loss: Literal[
        "surrogate", "positive", "tapered", "truncated_is", "masked", "ppo_is", "luffy", "aipo", "ce"
    ] = "positive"
    """Treatment of peers' trajectories."""
    mu_source: Literal["recorded", "span", "one"] = "recorded"
    """Writer's probability of an external token: as recorded (unknown: 1 under `aipo`, token left out under `ppo_is`
    and `truncated_is`); `span`: every token of a helper's reply gets the reply's geometric mean ratio, which also helpers
    with another tokenizer have; or 1 for all."""
    c_min: float = Field(0.2, ge=0)
    """`aipo`: smallest coefficient where the advantage is positive. A bias towards imitation, chosen."""
    c_max: float = Field(1.0, gt=0)
    """`aipo` and `truncated_is`: largest coefficient."""
    external_negative: Literal["tapered", "zero", "full"] = "tapered"
    """`aipo` where the advantage is negative: capped without a floor, nothing, or as where it is positive."""
    ext_clip_low: float = Field(0.2, gt=0)
    """`aipo`: lower clip distance."""
    ext_clip_high: float = Field(1.0, gt=0)
    """`aipo`: upper clip distance (1.0: at most twice as likely per batch)."""
    lambda_ext: float = Field(1.0, ge=0)
    """Factor on the loss of helpers' tokens."""
    ext_grad_share_cap: float = Field(0.0, ge=0, lt=1)
    """Largest share of helpers' tokens in the batch's summed logit-gradient norms: beyond it their loss is scaled down.
    Costs one more forward pass. 0: off."""
    ce_coef: float = Field(0.1, ge=0)
    """`ce`: weight of the cross-entropy, a mean over its own tokens."""
    luffy_gamma: float = Field(0.1, gt=0)
    """`luffy`: probability at which the push is strongest."""
    dual_clip: float = Field(3.0, gt=1)
    """`ppo_is`: largest ratio where the advantage is negative."""


Recompute = Literal["none", "mlp", "layer"]


class OptimConfig(Section):
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW first-moment decay."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW second-moment decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest L2 norm of the gradient."""
    updates: int = Field(1, ge=1)
    """Optimiser steps on each batch (same data; ratios differ from 1 after the first)."""
    token_budget: int = Field(16384, ge=1)
    """Most tokens of a micro-batch. Changes memory and speed, never the update."""
    activation_checkpointing: Recompute = "none"
    """Activations made again in the backward pass. `mlp`: all after a layer's attention, more than half, for up to a sixth
    more time. `layer`: all but one state per layer and token, about a third more. Without a packed layout: layers."""


class SftConfig(Section):
    rows: int = Field(64, ge=1)
    """Worked answers per step."""
    answers: str = "reference"
    """Where they come from: `reference` (the bare reference answer in `<answer>` tags), or `module:function` /
    `file.py:function`, given a Problem and a seed, returning the text to imitate."""


class EvalConfig(Section):
    every: int = Field(10, ge=0)
    """Steps between held-out evaluations. 0: only at the start and the end."""
    problems: int = Field(32, ge=1)
    """Held-out problems per task."""
    samples: int = Field(4, ge=1)
    """Sampled answers per held-out problem, at the training temperature."""
    ks: tuple[int, ...] = ()
    """Also report pass@k for these k (each at most `samples`)."""
    modes: tuple[Literal["tagged", "helped"], ...] = ()
    """Also evaluate in these modes of a policy that has helpers (docs/helpers.md), on the same problems."""


class ScoringConfig(Section):
    workers: int = Field(1, ge=1)
    """Scoring processes."""
    timeout_s: float = Field(5.0, gt=0)
    """Wall time allowed for one answer before its worker is killed."""
    memory_mb: int = Field(1024, ge=64)
    """Address space of a worker."""
    allow_unconfined: bool = False
    """Score untrusted text even where this system lacks a means of confinement (named at start)."""


class HelperConfig(Section):
    """One role's helper (`[helpers.roles.verify]`)."""

    backend: Literal["openai", "local", "scripted"] = "openai"
    """`openai`: an OpenAI-compatible endpoint; `local`: a frozen model in this process; `scripted`: code or a table."""
    limit: int = Field(2, ge=1)
    """Consultations of this role per trajectory."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of the helper. At 0 its log-probs are not used."""
    max_tokens: int = Field(0, ge=0)
    """Tokens asked of the helper. 0: `helpers.feedback_tokens`. Models that think first need more."""
    url: str = ""
    """openai: base URL including the version (`http://localhost:8000/v1`)."""
    model: str = ""
    """openai: model name sent to the endpoint. local: `base` (the start model, frozen), a Hugging Face id, a folder."""
    key_env: str = ""
    """openai: name of the environment variable that holds the API key. Empty: no key is sent."""
    same_tokenizer: bool = False
    """openai: the endpoint serves a model with the policy's tokenizer and returns `token_ids` (vLLM): they are inserted
    as they are, with the endpoint's log-probs."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """openai: further fields of the request; they override the ones set here."""
    call: str = ""
    """scripted: `module:function` or `path/file.py:function`, given a HelperRequest, returning the reply's text."""
    table: dict[str, str] = Field(default_factory=dict)
    """scripted: query -> reply; the key `*` answers everything else."""


class HelpersConfig(Section):
    """Helpers the policy may ask in the middle of a rollout. No roles: off."""

    roles: dict[str, HelperConfig] = Field(default_factory=dict)
    """Role (`verify`, `knowledge`, `reasoning`, or one that `prompts` defines) -> its helper."""
    form: str = "full"
    """Set of tags and texts in the prompts file: `full` (instructions for a chat model) or `short` (a few characters,
    for models too small to follow instructions)."""
    prompts: str = ""
    """TOML file with tags, texts and notes; tables in it override the shipped ones of the same name."""
    total_limit: int = Field(4, ge=1)
    """Consultations per trajectory, all roles together."""
    query_tokens: int = Field(256, ge=1)
    """Longest question; a longer one is answered with a note."""
    feedback_tokens: int = Field(192, ge=1)
    """Longest reply; a longer one is cut at a token and marked as cut."""
    reserve: float = Field(0.25, ge=0, lt=1)
    """Share of `rollout.max_new_tokens` kept for the policy after the last reply."""
    shown_tokens: int = Field(1024, ge=0)
    """Most recent tokens of the trajectory that the helper sees."""
    notes_limit: int = Field(2, ge=0)
    """Error notes (invalid question, limit reached) per trajectory; the next such question ends it."""
    train_wrappers: bool = False
    """Train the tags around replies as the helper's words: only for the `tagged` evaluation mode, where the policy has
    to write them itself. Costs accuracy in plain mode."""
    solo_min: int = Field(2, ge=0)
    """Least trajectories of a group under the plain prompt, without helpers."""
    solo_start: float = Field(0.25, ge=0, le=1)
    """Share of solo trajectories at the start."""
    solo_end: float = Field(0.75, ge=0, le=1)
    """Share of solo trajectories after `solo_steps`."""
    solo_steps: int = Field(100, ge=1)
    """Steps over which the share moves linearly from `solo_start` to `solo_end`."""
    max_failed: float = Field(0.5, ge=0, le=1)
    """A group with a larger share of helped trajectories lost to helper failures is left out."""
    collapse_steps: int = Field(20, ge=1)
    """Steps in a row without any consultation after which `helpers/collapsed` turns 1."""
    timeout_s: float = Field(30.0, gt=0)
    """Wall time of one try."""
    tries: int = Field(3, ge=1)
    """Tries per question; waits between them double and are jittered."""
    concurrency: int = Field(16, ge=1)
    """Questions in flight at once, to each helper."""
    breaker_failures: int = Field(8, ge=1)
    """Failed questions in a row after which a helper is not asked for `breaker_cooldown_s`."""
    breaker_cooldown_s: float = Field(60.0, gt=0)
    """Rest after which one question is let through to see whether the helper is back."""
    max_reply_bytes: int = Field(1 << 20, ge=1024)
    """A response body beyond this is not read further and counts as failed."""


class CheckpointConfig(Section):
    every: int = Field(1, ge=1)
    """Steps between checkpoints. A killed run repeats the steps since the last one, bit-identically on a CPU."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class SwarmConfig(Section):
    exchange: Literal["none", "memory", "local", "network"] = "none"
    """What carries groups: nothing, one process, one machine (a SQLite file), or the network (zenoh relays)."""
    name: str = Field("swarm", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    """Name of the swarm; groups of another swarm are refused."""
    peer_groups: int = Field(4, ge=0)
    """Peers' groups per update: SAPO's J. 0: publish only."""
    share: Literal["all", "informative", "nothing"] = "informative"
    """Which own groups are published. `informative`: those whose rewards differ; the others teach nobody."""
    selection: Literal["uniform", "informative", "variance"] = "informative"
    """How peers' groups are chosen; `informative` is the paper's: non-zero advantage, then uniform."""
    own_selection: Literal["all", "informative"] = "all"
    """The same filter for own groups, as its own switch."""
    per_peer: int = Field(0, ge=0)
    """Most groups of one peer per update. 0: twice an equal share among those heard lately."""
    per_task: int = Field(0, ge=0)
    """Most peers' groups of one task per update. 0: no limit."""
    max_age: int = Field(8, ge=0)
    """Groups this many versions behind the newest known of their author are refused."""
    ttl: int = Field(4, ge=1)
    """Own steps after which an unused group leaves the pool."""
    pool: int = Field(64, ge=1)
    """Most peers' groups waiting to be used."""
    longer: float = Field(1.25, ge=0)
    """Drop peers' right answers over this many times the 99th percentile of own answers' lengths (same task). 0: off."""
    less_likely: float = Field(2.0, ge=0)
    """Drop peers' groups with 16 tokens this many times less likely (mean log-prob) than own least likely 1%. 0: off."""
    ratio: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` halves peer_groups while own held-out accuracy falls or KL jumps."""
    token_ids: bool = True
    """Send token ids (used by peers with the same tokenizer); text is always sent."""
    logprobs: Literal["none", "float16", "float32"] = "float16"
    """Send the author's log-probs with the token ids, and how precisely."""
    collect_s: float = Field(2.0, gt=0)
    """Most time a step spends on checking and scoring peers' groups."""
    wait_s: float = Field(0.0, ge=0)
    """Most time a step waits for a first message, if none has arrived. 0: never."""
    message_bytes: int = Field(262_144, ge=1024)
    """Longer messages are dropped unread."""
    max_trajectories: int = Field(64, ge=1)
    """Groups with more answers are refused."""
    max_tokens: int = Field(0, ge=0)
    """Peers' groups with a longer answer are refused. 0: as long as own ones (`rollout.max_new_tokens`)."""
    identity: str = ""
    """Private key file of this node; created on first use. Empty: identity.pem in the run directory."""
    allow: tuple[str, ...] = ()
    """Node ids whose groups are taken. Empty: everybody's."""
    trust: tuple[str, ...] = ()
    """Node ids whose dataset problems are taken with the text and answer that they send, if the file is not here too."""
    send_problems: bool = False
    """Send the text and answer of dataset problems along, for peers who trust this node. Everybody in the swarm can read them."""
    invite_file: str = ""
    """File with the swarm's shared secret (`coterie swarm invite FILE`): messages are sealed with it."""
    path: str = ""
    """File of the `local` exchange. Empty: swarm.sqlite beside the run directory."""
    connect: tuple[str, ...] = ()
    """Relays to dial (`network`), e.g. "tcp/relay.example.org:7447"; several are tried in turn."""
    listen: tuple[str, ...] = ()
    """Endpoints to open (`network`) for a small mesh without a relay. Empty: no port is opened."""
    pace: float = Field(50.0, ge=0)
    """Messages sent per second at most: a quarter of a relay's default limit. 0: as fast as they come."""
    tls_ca: str = ""
    """PEM file of the authority that signed the relay's certificate (tls/ endpoints)."""
    tls_certificate: str = ""
    """PEM certificate of this node, for relays that ask for one (mutual TLS)."""
    tls_key: str = ""
    """PEM key of that certificate."""
    user: str = ""
    """User name for the relay."""
    password_file: str = ""
    """File with the password for the relay."""


class ParallelConfig(Section):
    """Experts trained apart from one base and merged (`coterie parallel`)."""

    experts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name of an expert -> the tasks (keys of `[tasks]`) it is trained on, for `steps` steps."""
    method: Literal["sum", "mean", "ties", "dare", "dare_ties", "svd"] = "sum"
    """How the experts are merged (see `coterie merge`)."""
    lam: float = 1.0
    """Scale of the merged update: merged = base + lam * (what the method makes of the deltas)."""
    density: float = Field(0.0, ge=0, le=1)
    """`ties`, `dare`, `dare_ties`: share of values kept. 0: the method's default."""
    rank: int = Field(1, ge=1)
    """`svd`: rank of every delta."""
    sweep: tuple[float, ...] = ()
    """Further values of `lam` that are merged and evaluated, and nothing more."""
    shrink: bool = True
    """Also evaluate base + lam * delta of each expert alone: what shrinking costs, without any other expert."""
    adapt_steps: int = Field(0, ge=0)
    """Steps of training on all tasks after the merge. 0: as many as `adapt_share` says."""
    adapt_share: float = Field(0.0, ge=0, le=1)
    """The same as a share of all experts' steps together (the paper: 0.05). Both 0: no adaptation."""
    baselines: tuple[Literal["mixed", "multi_stage"], ...] = ()
    """`mixed`: one run on all tasks; `multi_stage`: one task set after the other. Each has as many steps as all experts
    together."""
    jobs: int = Field(0, ge=0)
    """Training processes at a time. 0: one per core, at most one per expert. Where they train on GPUs, at most one per GPU."""
    retries: int = Field(1, ge=0)
    """How often a training process that dies is started again, from its last checkpoint."""
    backend: Literal["local", "ray"] = "local"
    """`local`: processes on this machine; `ray`: tasks on a Ray cluster with a shared file system (extra `ray`)."""
    log_updates: int = Field(0, ge=0)
    """Keep a sketch of every update as applied, of this many values (a power of two; 65536 is 256 KiB a step), for the
    cross-time report. 0: off."""
    probe: int = Field(0, ge=0)
    """Problems per task of a gradient probe of the base that enters the verdicts (see `coterie probe`; 64 or more). 0: none."""

    @model_validator(mode="after")
    def _usable(self) -> ParallelConfig:
        if self.log_updates & (self.log_updates - 1):
            raise ValueError(f"log_updates must be 0 or a power of two, not {self.log_updates}")
        if 0 < self.probe < 4:
            raise ValueError(f"probe must be 0 or at least 4, not {self.probe}: halves of a task are compared")
        for name, tasks in self.experts.items():
            if not re.fullmatch(r"[\w-]+", name) or not tasks:
                raise ValueError(f"experts: {name!r} needs a name of letters, digits, - and _, and at least one task")
        return self


class TrackingConfig(Section):
    transcripts: int = Field(4, ge=0)
    """Trajectories written to trajectories.jsonl per step."""
    tensorboard: bool = False
    """Also log to TensorBoard (extra `tensorboard`)."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    trackio: bool = False
    """Also log to trackio (extra `trackio`)."""


class Config(Section):
    """Everything a run depends on."""

    method: Literal["rl", "sft"] = "rl"
    """`rl`: the loop; `sft`: supervised training on worked answers to the same tasks (`coterie sft` sets it)."""
    run_dir: str = "runs/run"
    """Where the run is written."""
    steps: int = Field(100, ge=0)
    """Training steps."""
    tokens: int = Field(0, ge=0)
    """Stop earlier, after the step in which this many tokens have been generated, helpers' words included (`sft`: trained
    on). 0: no such limit. For comparing methods at equal cost."""
    seed: int = Field(0, ge=0)
    """All randomness derives from this, the step and the purpose."""
    threads: int = Field(0, ge=0)
    """CPU threads for torch. 0: all cores."""
    model: ModelConfig = ModelConfig()
    tasks: dict[str, TaskConfig] = Field(default_factory=dict)
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()
    scoring: ScoringConfig = ScoringConfig()
    helpers: HelpersConfig = HelpersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    swarm: SwarmConfig = SwarmConfig()
    parallel: ParallelConfig = ParallelConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for found in conflicts(self):
            raise ValueError(found)
        return self

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json"))


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (TOML) and apply dotted ``overrides`` (``["--optim.lr", "1e-4"]``).

    Raises:
        UserError: missing file, broken TOML (with line and column), unknown key (with a suggestion), wrong type or value.
    """
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise UserError(f"config {file}: no such file")
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise UserError(f"config {file}: not valid TOML: {e}") from e
    for key, value in _pairs(overrides):
        _set(data, key.split("."), value)
    return config_from_dict(data)


def config_from_dict(data: dict[str, Any]) -> Config:
    """Validate a nested dict. Raises UserError with one line per problem."""
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        raise UserError("\n".join(_explain(err) for err in e.errors())) from e


def _pairs(flags: Sequence[str]) -> list[tuple[str, Any]]:
    """Split ``--a.b value`` and ``--a.b=value`` into pairs; values are read as TOML, else taken as text."""
    out: list[tuple[str, Any]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {flag!r}: config values are set with --section.key VALUE")
        key, eq, text = flag[2:].partition("=")
        if not eq:
            if not rest:
                raise UserError(f"--{key} needs a value")
            text = rest.pop(0)
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        out.append((key, value))
    return out


def _set(data: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise UserError(f"--{'.'.join(path)}: {part} is a value, not a section")
    data[path[-1]] = value


def _explain(err: Any) -> str:
    where = ".".join(str(p) for p in err["loc"])
    if err["type"] == "extra_forbidden":
        known = _known_keys(err["loc"][:-1])
        close = difflib.get_close_matches(str(err["loc"][-1]), known, n=1, cutoff=0.5)
        section = ".".join(str(p) for p in err["loc"][:-1])
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
        return f"config: unknown key {err['loc'][-1]!r} in {f'[{section}]' if section else 'the top level'}; {hint}"
    message = err["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(err.get("input"), dict) else f" (got {err.get('input')!r})"
    return f"config: {where + ': ' if where else ''}{message}{shown}"


def _known_keys(loc: Sequence[Any]) -> list[str]:
    section: Any = Config
    for part in loc:
        if section in _LISTED.values() or not hasattr(section, "model_fields"):
            break
        info = section.model_fields.get(str(part))
        if info is None:  # a task's own name
            continue
        section = _LISTED.get(str(part), info.annotation)
    return list(getattr(section, "model_fields", {}))


_LISTED: dict[str, Any] = {"tasks": TaskConfig, "roles": HelperConfig}  # tables whose keys the user names
