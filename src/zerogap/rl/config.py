"""Every key of a run configuration: its type, its range, its default, its unit.

The models are the single source: validation, error lines, ``docs/configuration.md`` and the resolved configuration in
the run folder all come from them. A key whose value cannot change the bits of the trained weights carries
``bits: False``; only those may differ when a run is resumed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

_MIN_TEMPERATURE = 1e-4  # as the engine's; this module imports no torch
NOT_BITS: dict[str, Any] = {"bits": False}
_MOST = 2**20  # sequences of a step, held as Python objects: what is above it is a slip of the keyboard


def _reference(value: str) -> str:
    module, colon, name = value.partition(":")
    if not (colon and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])):
        raise PydanticCustomError("text", "must be 'module:function', such as 'my_rewards:exact'")
    return value


FunctionReference = Annotated[str, AfterValidator(_reference)]


class Section(BaseModel):
    """One table of the file: strict types, no unknown keys, no NaN or inf, unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _no_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError("text", "must not hold a NUL character")
        return value


class RunSection(Section):
    """Where the run lives and how long it is."""

    dir: str = Field(min_length=1, description="run folder: metrics, samples, checkpoints", json_schema_extra=NOT_BITS)
    steps: int = Field(
        ge=1, description="rollout-and-update steps, counted from the first run on", json_schema_extra=NOT_BITS
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of prompts order and of every random draw")
    resume: Literal["never", "auto"] = Field(
        default="never",
        description="what happens if run.dir holds a run: never = refuse, auto = continue from its newest checkpoint "
        "(--resume replaces this)",
        json_schema_extra=NOT_BITS,
    )
    checkpoint_every: int = Field(
        default=10,
        ge=0,
        description="steps between checkpoints; the last step always has one; 0 = only the last step",
        json_schema_extra=NOT_BITS,
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="newest checkpoints that are kept", json_schema_extra=NOT_BITS
    )


class ModelSection(Section):
    """What is trained."""

    path: str = Field(min_length=1, description="Hugging Face folder, hub name, or builtin:tiny-qwen3")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="number format of weights and rows on both sides; bfloat16 = AdamW moves float32 masters, of which "
        "the weights are the rounded ones (on the CPU: portable backend)",
    )
    weights: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="with model.dtype = float32, the weights that both sides compute with: bfloat16 = the trained "
        "float32 ones, rounded (norms excepted), half the bytes per decoded token; native backend only",
    )
    backend: Literal["auto", "native", "portable"] = Field(
        default="auto",
        description="what computes on both sides: native = the CPU kernels of zerogap-kernels, portable = torch; "
        "auto = native if it is installed and model.dtype = float32",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda:\d+)$",
        description="where engine and trainer compute: cpu, or a GPU by number, such as cuda:0; never guessed",
    )
    max_positions: int | None = Field(
        default=None, ge=1, description="longest prompt plus completion, tokens; unset = what the model allows"
    )


class TaskSection(Section):
    """What is asked and how an answer is judged."""

    name: Literal["arithmetic", "jsonl"] = Field(
        default="arithmetic", description="arithmetic = two-digit addition, built in; jsonl = prompts from task.path"
    )
    path: str | None = Field(default=None, min_length=1, description="JSONL file of training prompts (jsonl)")
    eval_path: str | None = Field(
        default=None, min_length=1, description="JSONL file of held-out prompts (jsonl)", json_schema_extra=NOT_BITS
    )
    reward: FunctionReference | None = Field(
        default=None,
        description="module:function called as reward(prompt, completion, answer, **fields) -> float; "
        "unset = exact match (arithmetic)",
    )
    rollout: FunctionReference | None = Field(
        default=None,
        description="module:function called as rollout(context, prompt) -> Transcript; "
        "unset = one completion per sample",
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="JSONL key of the prompt: a text or a list of chat messages"
    )
    answer_key: str = Field(default="answer", min_length=1, description="JSONL key of the answer")
    chat: bool = Field(
        default=False, description="true = a prompt that is a text becomes one user message of the chat template"
    )
    shuffle: bool = Field(
        default=True, description="true = a new order every epoch, from run.seed and the epoch; false = file order"
    )


class RolloutSection(Section):
    """How completions are sampled for training."""

    prompts_per_step: int = Field(default=16, ge=1, le=_MOST, description="prompts per step")
    samples_per_prompt: int = Field(
        default=8,
        ge=2,
        le=_MOST,
        description="completions per prompt (a group); an advantage compares within the group, so at least 2",
    )
    temperature: float = Field(default=1.0, ge=0, le=100, description="logits are divided by it; above 0")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="smallest set of tokens with this probability mass; 1 = off"
    )
    top_k: int = Field(default=0, ge=0, description="most probable tokens kept; 0 = off")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="least probability kept, as a share of the largest; 0 = off"
    )
    max_tokens: int = Field(default=16, ge=1, description="longest completion, tokens")
    min_tokens: int = Field(default=0, ge=0, description="tokens before a stop token may be sampled")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), strict=False, description="texts that end a completion"
    )
    time_limit_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="limit of what a custom rollout (task.rollout) does by itself between two calls of the engine, "
        "seconds; beyond it the run ends",
        json_schema_extra=NOT_BITS,
    )


class EngineSection(Section):
    """The rollout engine's memory and batching: by the row law none of it changes a bit of the results."""

    page_size: int = Field(
        default=16, ge=1, le=4096, description="tokens per KV-cache page", json_schema_extra=NOT_BITS
    )
    kv_bytes: int | None = Field(
        default=None,
        ge=1,
        description="KV-cache memory, bytes; unset = 256 MiB on the CPU, on a GPU what the run leaves free, up to what "
        "engine.max_sequences sequences can fill",
        json_schema_extra=NOT_BITS,
    )
    num_pages: int | None = Field(
        default=None, ge=1, description="KV-cache pages; set = replaces engine.kv_bytes", json_schema_extra=NOT_BITS
    )
    max_rows_per_step: int = Field(
        default=512,
        ge=1,
        description="tokens per engine step, prompts' chunks and decoding together",
        json_schema_extra=NOT_BITS,
    )
    max_sequences: int = Field(default=128, ge=1, description="sequences that run at once", json_schema_extra=NOT_BITS)
    weights: Literal["shared", "own"] = Field(
        default="shared",
        description="shared = engine and trainer compute with the same tensors; own = the engine has a copy, which is "
        "renewed and compared with the trainer's after every step: twice the memory",
        json_schema_extra=NOT_BITS,
    )
    prefix_cache: bool = Field(
        default=True, description="reuse KV pages of equal prefixes at the same weights", json_schema_extra=NOT_BITS
    )
    cuda_graphs: bool = Field(
        default=True,
        description="on a GPU, replay captured decode steps instead of launching every kernel from Python",
        json_schema_extra=NOT_BITS,
    )


class TrainSection(Section):
    """Loss and optimiser (AdamW)."""

    learning_rate: float = Field(default=1e-5, gt=0, le=10, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="course of the learning rate after the warm-up; linear and cosine reach 0 at run.steps",
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(
        default=0.0, ge=0, le=100, description="decoupled weight decay of matrices, per unit of learning rate"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW's decay of the first and second moment"
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="AdamW's epsilon")
    max_grad_norm: float = Field(default=1.0, ge=0, description="gradients are scaled down to this L2 norm; 0 = off")
    advantage: Literal["grpo", "dr_grpo"] = Field(
        default="grpo",
        description="grpo = (reward - group mean) / group standard deviation; dr_grpo = reward - group mean",
    )
    clip_low: float = Field(default=0.2, gt=0, le=1, description="probability ratio is clipped below 1 - clip_low")
    clip_high: float = Field(default=0.2, gt=0, le=1e9, description="probability ratio is clipped above 1 + clip_high")
    aggregation: Literal["token-mean", "sequence-mean", "sequence-mean-token-sum-norm"] = Field(
        default="token-mean",
        description="token-mean = mean over all trained tokens; sequence-mean = mean over sequences of token means; "
        "sequence-mean-token-sum-norm = mean over sequences of their token sums / train.norm_length",
    )
    norm_length: int | None = Field(default=None, ge=1, description="see above, tokens; unset = rollout.max_tokens")
    updates_per_rollout: int = Field(
        default=1, ge=1, description="optimiser updates per step; each takes its share of the completions"
    )
    tokens_per_micro_batch: int = Field(default=4096, ge=1, description="tokens per forward and backward pass")
    gradient_checkpointing: bool = Field(
        default=False, description="true = keep only each layer's input and compute the rest again in the backward pass"
    )


class GapSection(Section):
    """What the bit-for-bit comparison covers and what a difference does."""

    gate: Literal["stop", "warn"] = Field(
        default="stop",
        description="stop = end the run before the update, exit code 1; warn = go on",
        json_schema_extra=NOT_BITS,
    )
    scope: Literal["trained", "all"] = Field(
        default="trained",
        description="trained = tokens that are trained on; all = every token that the engine sampled for training",
        json_schema_extra=NOT_BITS,
    )


class RewardSection(Section):
    """The worker processes that call the reward function."""

    workers: int = Field(default=2, ge=1, le=256, description="worker processes", json_schema_extra=NOT_BITS)
    time_limit_s: float = Field(default=10.0, gt=0, le=86400, description="limit of one reward call, seconds")
    on_error: float = Field(
        default=0.0,
        ge=-1e9,
        le=1e9,
        description="reward of a call that raises, hangs, dies or returns no finite number",
    )


class EvalSection(Section):
    """Held-out evaluation; it never changes the training."""

    every: int = Field(
        default=10,
        ge=0,
        description="steps between evaluations, beside those before the first and after the last step; 0 = never",
        json_schema_extra=NOT_BITS,
    )
    prompts: int = Field(
        default=200, ge=1, le=_MOST, description="held-out prompts, at most", json_schema_extra=NOT_BITS
    )
    samples: int = Field(default=1, ge=1, le=_MOST, description="completions per prompt", json_schema_extra=NOT_BITS)
    temperature: float = Field(default=1.0, ge=0, le=100, description="0 = greedy", json_schema_extra=NOT_BITS)
    top_p: float = Field(default=1.0, gt=0, le=1, description="as rollout.top_p", json_schema_extra=NOT_BITS)
    top_k: int = Field(default=0, ge=0, description="as rollout.top_k", json_schema_extra=NOT_BITS)
    min_p: float = Field(default=0.0, ge=0, le=1, description="as rollout.min_p", json_schema_extra=NOT_BITS)
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="longest completion, tokens; unset = rollout.max_tokens",
        json_schema_extra=NOT_BITS,
    )


class Config(Section):
    """A whole run configuration; each field is one table of the file."""

    run: RunSection
    model: ModelSection
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    train: TrainSection = TrainSection()
    gap: GapSection = GapSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _between_keys(self) -> Config:
        for key, problem in _conflicts(self):
            raise PydanticCustomError("between", "{key}: {problem}", {"key": key, "problem": problem})
        return self


def _conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (section.key, what is wrong and what to do) for values that are fine alone but not together."""
    task, rollout, train, model = config.task, config.rollout, config.train, config.model
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    rules = [
        (
            model.weights == "bfloat16" and model.dtype == "bfloat16",
            "model.weights",
            "'bfloat16' rounds float32 weights; with model.dtype = 'bfloat16' they are so already; remove this key",
        ),
        (
            model.backend == "native" and model.dtype == "bfloat16" and model.device == "cpu",
            "model.backend",
            "'native' computes with rows in float32; with model.dtype = 'bfloat16' leave it at 'auto', or set "
            "model.dtype = 'float32' and model.weights = 'bfloat16'",
        ),
        (
            sequences > _MOST,
            "rollout.prompts_per_step",
            f"x rollout.samples_per_prompt = {sequences:,} sequences per step; at most {_MOST:,} are possible",
        ),
        (
            any("\ufffd" in text for text in rollout.stop),
            "rollout.stop",
            "a text holds U+FFFD, which stands for bytes that are no character; remove it",
        ),
        (
            rollout.temperature == 0,
            "rollout.temperature",
            "0 is greedy: there is no distribution to train on; set it above 0 (eval.temperature may be 0)",
        ),
        *(
            (
                0 < temperature < _MIN_TEMPERATURE,
                f"{section}.temperature",
                f"{temperature} is too small: logits divided by it overflow; set it to {_MIN_TEMPERATURE} or more",
            )
            for section, temperature in (("rollout", rollout.temperature), ("eval", config.eval.temperature))
        ),
        (
            rollout.min_tokens > rollout.max_tokens,
            "rollout.min_tokens",
            f"{rollout.min_tokens} is above rollout.max_tokens = {rollout.max_tokens}; lower it",
        ),
        (
            train.updates_per_rollout > sequences,
            "train.updates_per_rollout",
            f"{train.updates_per_rollout} is above rollout.prompts_per_step x rollout.samples_per_prompt = "
            f"{sequences:,}, so that an update would have no completion; lower it",
        ),
        (
            train.norm_length is not None and train.aggregation != "sequence-mean-token-sum-norm",
            "train.norm_length",
            f"has no meaning with train.aggregation = '{train.aggregation}'; remove it",
        ),
        (
            task.name == "jsonl" and task.path is None,
            "task.path",
            "missing; task.name = 'jsonl' reads its prompts from it",
        ),
        (
            task.name == "jsonl" and task.reward is None,
            "task.reward",
            "missing; task.name = 'jsonl' needs a 'module:function', such as 'zerogap.rl.tasks.scoring:exact_match'",
        ),
        (
            task.name == "jsonl" and task.eval_path is None and config.eval.every > 0,
            "task.eval_path",
            "missing; give held-out prompts or set eval.every = 0",
        ),
        (
            task.name == "arithmetic" and (task.path is not None or task.eval_path is not None),
            "task.path" if task.path is not None else "task.eval_path",
            "task.name = 'arithmetic' makes its own prompts; remove this key or set task.name = 'jsonl'",
        ),
        (
            task.name == "arithmetic" and task.chat,
            "task.chat",
            "task.name = 'arithmetic' has plain prompts; remove this key or set task.name = 'jsonl'",
        ),
    ]
    return [(key, problem) for broken, key, problem in rules if broken]
