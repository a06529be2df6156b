"""Puts a run together from its configuration, and refuses here what would fail later."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from zerogap.engine import Engine, EngineConfig, SamplingParams
from zerogap.errors import UsageError
from zerogap.files import write_text_atomic
from zerogap.models.decoder import Decoder
from zerogap.models.hub import resolve_model
from zerogap.models.selftest import prove_row_law
from zerogap.models.tokenizer import Tokenizer, load_tokenizer
from zerogap.models.weights import load_decoder
from zerogap.ops import ambient
from zerogap.rl.config import Config
from zerogap.rl.config_load import bit_differences, config_digest, load_config, to_toml
from zerogap.rl.custom import load_rollout
from zerogap.rl.memory import available_memory, estimate_memory, require_memory
from zerogap.rl.rollout import Generator
from zerogap.rl.tasks import Task, make_task
from zerogap.rl.tasks.base import encode_prompt
from zerogap.rl.tasks.jsonl import JsonlTask
from zerogap.trainer import (
    Checkpoint,
    LossSettings,
    Optimiser,
    OptimiserSettings,
    StepSettings,
    latest,
    load_weights,
    numerics_differences,
    open_checkpoint,
    restore_optimiser,
)
from zerogap.trainer.fingerprint import environment, fingerprint

CONFIG_FILE = "config.toml"


@dataclass
class Run:
    """Everything that the loop drives."""

    config: Config
    folder: Path
    source: Path  # the Hugging Face folder whose configuration and tokenizer files go into checkpoints
    decoder: Decoder
    engine: Engine
    tokenizer: Tokenizer
    task: Task
    generator: Generator
    optimiser: Optimiser
    settings: StepSettings
    numerics: dict[str, Any]
    checkpoint: Checkpoint | None


def set_up(config: Config, resume: str | None) -> Run:
    """Build a run.

    Args:
        config: checked configuration.
        resume: ``auto``, a checkpoint folder, or None to start anew.

    Raises:
        UsageError: anything that would make the run fail later.
        NotHeldError: the row law does not hold on this machine.
    """
    folder = Path(config.run.dir)
    checkpoint = _checkpoint(config, folder, resume)
    source = resolve_model(config.model.path)
    tokenizer = load_tokenizer(source)
    task = make_task(config)
    rollout = None if config.task.rollout is None else load_rollout(config.task.rollout)
    with ambient.guard():
        decoder = load_decoder(source) if checkpoint is None else load_weights(checkpoint)
        prove_row_law(decoder.config, decoder.dtype)
    max_positions = min(config.model.max_positions or decoder.config.max_positions, decoder.config.max_positions)
    key, max_tokens = _most_tokens(config)
    longest = _longest_prompt(task, tokenizer, max_positions) + max_tokens
    if rollout is not None:
        longest = max_positions
    elif longest > max_positions:
        raise UsageError(
            f"the longest prompt and {key} = {max_tokens} need {longest} positions, "
            f"the context has {max_positions}; lower {key} or shorten the prompts"
        )
    estimate = estimate_memory(config, decoder.config, longest)
    require_memory(estimate, available_memory(), psutil.Process().memory_info().rss)
    decoder.gradient_checkpointing = config.train.gradient_checkpointing
    engine = Engine(copy.deepcopy(decoder), tokenizer, _engine_config(config, longest))
    optimiser = Optimiser(decoder.named_parameters(), _optimiser_settings(config))
    numerics = environment() | {"fingerprint": fingerprint(decoder.config)}
    if checkpoint is not None:
        _check_numerics(checkpoint, numerics)
        _check_prompts(checkpoint, task)
        restore_optimiser(checkpoint, optimiser)
    return Run(
        config=config,
        folder=folder,
        source=source,
        decoder=decoder,
        engine=engine,
        tokenizer=tokenizer,
        task=task,
        generator=Generator(engine, tokenizer, max_positions, rollout),
        optimiser=optimiser,
        settings=_step_settings(config),
        numerics=numerics,
        checkpoint=checkpoint,
    )


def make_folder(run: Run) -> None:
    """Create the run folder with the resolved configuration and what the numbers depend on.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(run.folder / CONFIG_FILE, to_toml(run.config))
        write_text_atomic(run.folder / "numerics.json", json.dumps(run.numerics, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise UsageError(f"{run.folder}: cannot be written ({error.strerror}); set another run.dir") from None


def rollout_params(config: Config) -> SamplingParams:
    """Return how training completions are sampled."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        stop_strings=tuple(rollout.stop),
        seed=config.run.seed,
    )


def eval_params(config: Config) -> SamplingParams:
    """Return how held-out completions are sampled."""
    section = config.eval
    return SamplingParams(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        max_tokens=section.max_tokens or config.rollout.max_tokens,
        stop_strings=tuple(config.rollout.stop),
        seed=config.run.seed,
    )


def _checkpoint(config: Config, folder: Path, resume: str | None) -> Checkpoint | None:
    """Return the checkpoint to go on from, or None for a fresh start."""
    resume = resume or (None if config.run.resume == "never" else config.run.resume)
    if not (folder / CONFIG_FILE).exists():
        if resume not in (None, "auto"):
            return _open(Path(resume), config)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder}: exists and holds no run; set another run.dir")
        return None
    if resume is None:
        raise UsageError(f"{folder}: holds a run already; continue it with --resume auto or set another run.dir")
    differences = bit_differences(load_config(folder / CONFIG_FILE), config)
    if differences:
        raise UsageError(f"{folder}: cannot continue with another configuration: {'; '.join(differences)}")
    found = latest(folder) if resume == "auto" else Path(resume)
    return None if found is None else _open(found, config)


def _open(folder: Path, config: Config) -> Checkpoint:
    """Open a checkpoint, which may be another run's: its own configuration counts, not that of ``run.dir``."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.state.config_digest != config_digest(config):
        origin = folder.parent.parent / CONFIG_FILE
        differences = bit_differences(load_config(origin), config) if origin.exists() else []
        details = f" ({'; '.join(differences)})" if differences else ""
        raise UsageError(
            f"{folder}: belongs to a run of another configuration{details}; "
            f"to start a new run from its weights set model.path = '{checkpoint.model_folder}' without --resume"
        )
    return checkpoint


def _check_prompts(checkpoint: Checkpoint, task: Task) -> None:
    if checkpoint.state.extra.get("prompts") != task.digest:
        raise UsageError(
            f"{checkpoint.folder}: the training prompts are not those of the run; give its data set (task.path) back, "
            "or start a new run"
        )


def _check_numerics(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Allow another environment only where the probe's bits are the same."""
    saved = checkpoint.state.numerics
    if saved.get("fingerprint") != now["fingerprint"] or saved.get("numerics_version") != now["numerics_version"]:
        differences = "; ".join(numerics_differences(saved, now))
        raise UsageError(
            f"{checkpoint.folder}: this environment does not keep the run's bits ({differences}); "
            "resume where they are the same, for threads with OMP_NUM_THREADS"
        )


def _most_tokens(config: Config) -> tuple[str, int]:
    """Return the longest completion that the run may ask for, and the key that says so."""
    evaluated = (config.eval.max_tokens or 0) if config.eval.every > 0 else 0
    if evaluated > config.rollout.max_tokens:
        return "eval.max_tokens", evaluated
    return "rollout.max_tokens", config.rollout.max_tokens


def _longest_prompt(task: Task, tokenizer: Tokenizer, max_positions: int) -> int:
    """Return the longest prompt in tokens, after checking that each has room for an answer."""
    prompts = [*(task.train if isinstance(task, JsonlTask) else task.train_prompts(0)), *task.eval_prompts()]
    return max(len(encode_prompt(prompt, tokenizer, max_positions)) for prompt in prompts)


def _engine_config(config: Config, longest: int) -> EngineConfig:
    section = config.engine
    return EngineConfig(
        page_size=section.page_size,
        kv_bytes=section.kv_bytes if section.num_pages is None else None,
        num_pages=section.num_pages,
        max_rows_per_step=section.max_rows_per_step,
        max_sequences=section.max_sequences,
        prefix_cache=section.prefix_cache,
        max_length=longest,
    )


def _optimiser_settings(config: Config) -> OptimiserSettings:
    train = config.train
    return OptimiserSettings(
        learning_rate=train.learning_rate,
        beta1=train.betas[0],
        beta2=train.betas[1],
        epsilon=train.eps,
        weight_decay=train.weight_decay,
        schedule=train.schedule,
        warmup_updates=train.warmup_steps * train.updates_per_rollout,
        total_updates=config.run.steps * train.updates_per_rollout,
        max_grad_norm=train.max_grad_norm,
    )


def _step_settings(config: Config) -> StepSettings:
    train = config.train
    return StepSettings(
        loss=LossSettings(train.clip_low, train.clip_high, train.aggregation, norm_length=config.rollout.max_tokens),
        micro_batch_rows=train.tokens_per_micro_batch,
        score_untrained=config.gap.scope == "all",
    )


def describe(run: Run) -> str:
    """Return one line about what runs where."""
    shape = run.decoder.config
    parameters = sum(weight.numel() for weight in run.decoder.parameters())
    return (
        f"{run.config.model.path}: {shape.family}, {parameters:,} parameters, {run.config.model.dtype}, "
        f"{torch.get_num_threads()} threads, row law proved; run folder {run.folder}"
    )
