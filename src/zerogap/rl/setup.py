"""Puts a run together from its configuration, and refuses here what would fail later."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from zerogap.console import counted
from zerogap.engine import Engine, EngineConfig, SamplingParams
from zerogap.engine.kernels import prepare_gpu
from zerogap.errors import UsageError
from zerogap.files import write_text_atomic
from zerogap.models.config import ModelConfig
from zerogap.models.decoder import Decoder
from zerogap.models.hub import resolve_model
from zerogap.models.selftest import prove_row_law
from zerogap.models.tokenizer import Tokenizer, load_tokenizer
from zerogap.models.weights import load_decoder, side_files
from zerogap.ops import ambient, backend
from zerogap.rl.config import Config
from zerogap.rl.config_load import bit_differences, config_digest, load_config, to_toml
from zerogap.rl.custom import load_rollout
from zerogap.rl.gpu_memory import GpuPlan, fit_gpu, host_part, page_bytes
from zerogap.rl.memory import KV_BYTES, available_memory, estimate_memory, release_memory, require_memory
from zerogap.rl.rollout import Generator
from zerogap.rl.run_folder import CONFIG_FILE, FolderLock, holds_run, require_vacant, sweep
from zerogap.rl.tasks import Prompt, Task, make_task
from zerogap.rl.tasks.base import encode_prompt
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
from zerogap.trainer.fingerprint import describe_numerics


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
    gpu_plan: GpuPlan | None  # how it fills its GPU, if it is on one


def _device(config: Config) -> torch.device:
    device = torch.device(config.model.device)
    count = torch.cuda.device_count()
    if device.type == "cuda" and device.index >= count:
        raise UsageError(f"model.device={device}: PyTorch {torch.__version__} can use {count} GPUs of this machine")
    return device


def _dtype(config: Config) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def set_up(config: Config, resume: str | None) -> Run:
    """Build a run.

    Args:
        config: checked configuration.
        resume: ``auto``, a checkpoint folder, or None to start anew.

    Raises:
        UsageError: anything that would make the run fail later.
        NotHeldError: the row law does not hold on this machine.
    """
    if config.model.backend != "auto":
        backend.choose(config.model.backend, "model.backend")
    if config.model.weights == "bfloat16" and backend.cpu_backend() != "native":
        raise UsageError(
            f"model.weights = 'bfloat16': the {backend.describe()} backend computes with float32 weights only; "
            "install zerogap-kernels (pip install ./kernels) and leave model.backend at 'auto', or set 'float32'"
        )
    folder = Path(config.run.dir)
    checkpoint = _checkpoint(config, folder, resume)
    source = resolve_model(config.model.path)
    if checkpoint is not None:
        _check_source(checkpoint, source)
    shape = ModelConfig.from_folder(source)
    tokenizer = load_tokenizer(source)
    task = make_task(config)
    rollout = None if config.task.rollout is None else load_rollout(config.task.rollout)
    max_positions = _context(config, shape)
    longest = _longest_sequence(config, task, tokenizer, shape.vocab_size, max_positions)
    if rollout is not None:
        longest = max_positions
    # Before the weights are read: a model that does not fit must not first fill the memory.
    dtype = _dtype(config)
    estimate = estimate_memory(config, shape, longest, native=backend.name_of(dtype) == "native")
    device, plan = _device(config), None
    if device.type == "cuda":
        plan = fit_gpu(config, shape, estimate, longest, page_bytes(config, shape))
        estimate = host_part(estimate)
    require_memory(estimate, available_memory(), psutil.Process().memory_info().rss)
    with ambient.guard():
        decoder = load_decoder(source, dtype) if checkpoint is None else load_weights(checkpoint, dtype)
        if device.type == "cpu":
            prove_row_law(decoder.config, decoder.dtype)
        decoder.to(device)
    decoder.compute_with(config.model.weights)
    if device.type == "cuda":
        with counted("building kernels") as told:
            prepare_gpu(decoder.config, decoder.dtype, config.engine.page_size, device, told)
    decoder.gradient_checkpointing = config.train.gradient_checkpointing
    shared = config.engine.weights == "shared"
    engine_decoder = decoder.twin() if shared else copy.deepcopy(decoder)
    engine = Engine(engine_decoder, tokenizer, _engine_config(config, longest, plan), shared=shared)
    optimiser = Optimiser(decoder.named_parameters(), _optimiser_settings(config))
    numerics = describe_numerics(decoder.config, device, decoder.weights, dtype)
    release_memory()
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
        generator=Generator(engine, tokenizer, max_positions, rollout, config.rollout.time_limit_s),
        optimiser=optimiser,
        settings=step_settings(config),
        numerics=numerics,
        checkpoint=checkpoint,
        gpu_plan=plan,
    )


def make_folder(run: Run, lock: FolderLock) -> None:
    """Create the run folder with the resolved configuration and what the numbers depend on.

    Args:
        run: what was set up.
        lock: of its folder; taken here, unless the folder held a run before and it is held already.

    Raises:
        UsageError: it cannot be written, or another run took it in the meantime.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if not lock.held:
            lock.take()
            if holds_run(run.folder):
                raise UsageError(f"{run.folder}: another run began there just now; set another run.dir")
        sweep(run.folder)
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
    if resume is None and config.run.resume != "never":
        resume = config.run.resume
    if not holds_run(folder):
        require_vacant(folder)
        found = None if resume in (None, "auto") else Path(resume)
    else:
        if resume is None:
            raise UsageError(f"{folder}: holds a run already; continue it with --resume auto or set another run.dir")
        _check_config(folder / CONFIG_FILE, config)
        found = latest(folder) if resume == "auto" else Path(resume)
    if found is None:
        return None
    checkpoint = open_checkpoint(found)
    if checkpoint.state.config_digest != config_digest(config):
        its_config = found.absolute().parent.parent / CONFIG_FILE
        if its_config.exists():
            _check_config(its_config, config)
        raise UsageError(
            f"{found}: belongs to a run of another configuration; "
            f"to start a new run from its weights set model.path = '{checkpoint.model_folder}' without --resume"
        )
    return checkpoint


def _check_prompts(checkpoint: Checkpoint, task: Task) -> None:
    if checkpoint.state.extra.get("prompts") != task.digest:
        raise UsageError(
            f"{checkpoint.folder}: the training prompts are not those of the run; give its data set (task.path) back, "
            "or start a new run"
        )


def _check_config(path: Path, config: Config) -> None:
    differences = bit_differences(load_config(path), config)
    if differences:
        raise UsageError(f"{path.parent}: cannot continue with another configuration: {'; '.join(differences)}")


def _content(path: Path) -> object:
    """Return what a side file says, without the number format, which a saved ``config.json`` names anew."""
    if path.name != "config.json":
        return path.read_bytes()
    values = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name not in ("dtype", "torch_dtype")}


def _check_source(checkpoint: Checkpoint, source: Path) -> None:
    """Refuse to go on with another tokenizer or model configuration than the checkpoint has."""
    saved = {path.name: path for path in side_files(checkpoint.model_folder)}
    now = {path.name: path for path in side_files(source)}
    for name in sorted(saved.keys() | now.keys()):
        if name not in saved or name not in now or _content(saved[name]) != _content(now[name]):
            raise UsageError(
                f"{source}: is not the model that {checkpoint.folder} was trained from ({name} differs); "
                "set model.path to that one"
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


def _context(config: Config, shape: ModelConfig) -> int:
    """Return the longest prompt plus completion, tokens."""
    asked = config.model.max_positions
    if asked is not None and asked > shape.max_positions:
        raise UsageError(
            f"model.max_positions = {asked}: the model has {shape.max_positions}; lower it or leave it out"
        )
    return shape.max_positions if asked is None else asked


def _longest_sequence(config: Config, task: Task, tokenizer: Tokenizer, vocab_size: int, max_positions: int) -> int:
    """Return the longest prompt plus completion in tokens, after checking every prompt."""

    def longest(prompts: Sequence[Prompt]) -> int:
        lengths = []
        for prompt in prompts:
            ids = encode_prompt(prompt, tokenizer, max_positions)
            if max(ids) >= vocab_size:
                raise UsageError(
                    f"{prompt.name}: the tokenizer gives token id {max(ids)}, the model's vocabulary is "
                    f"0..{vocab_size - 1}; tokenizer.json and config.json belong to different models"
                )
            lengths.append(len(ids))
        return max(lengths)

    train, held_out = rollout_params(config), eval_params(config)
    needs = {"rollout.max_tokens": (longest(task.all_train_prompts()), train.max_tokens)}
    if config.eval.every > 0:
        key = "rollout.max_tokens" if config.eval.max_tokens is None else "eval.max_tokens"
        needs[f"{key} in evaluation"] = (longest(task.eval_prompts()), held_out.max_tokens)
    for key, (prompt, completion) in needs.items():
        if prompt + completion > max_positions:
            raise UsageError(
                f"the longest prompt ({prompt} tokens) and {key} = {completion} need {prompt + completion} positions, "
                f"the context has {max_positions}; lower {key.split()[0]} or shorten the prompts"
            )
    return max(prompt + completion for prompt, completion in needs.values())


def _engine_config(config: Config, longest: int, plan: GpuPlan | None) -> EngineConfig:
    section = config.engine
    kv_bytes = section.kv_bytes or (KV_BYTES if plan is None else plan.kv_cache - plan.page)  # one takes padding
    return EngineConfig(
        page_size=section.page_size,
        kv_bytes=kv_bytes if section.num_pages is None else None,
        num_pages=section.num_pages,
        max_rows_per_step=section.max_rows_per_step,
        max_sequences=section.max_sequences,
        prefix_cache=section.prefix_cache,
        max_length=longest,
        cuda_graphs=section.cuda_graphs,
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


def step_settings(config: Config) -> StepSettings:
    """Return how an update is computed."""
    train = config.train
    norm_length = train.norm_length or config.rollout.max_tokens
    return StepSettings(
        loss=LossSettings(train.clip_low, train.clip_high, train.aggregation, norm_length),
        micro_batch_rows=train.tokens_per_micro_batch,
        score_untrained=config.gap.scope == "all",
    )


def _backend(decoder: Decoder) -> str:
    if decoder.device.type == "cuda":
        return f"triton ({decoder.device}, {torch.cuda.get_device_name(decoder.device)})"
    return backend.describe(decoder.dtype)


def describe(run: Run) -> str:
    """Return one line about what runs where."""
    shape = run.decoder.config
    parameters = sum(weight.numel() for weight in run.decoder.parameters())
    return (
        f"{run.config.model.path}: {shape.family}, {parameters:,} parameters, {run.config.model.dtype}"
        f"{' with weights rounded to bfloat16' if run.config.model.weights == 'bfloat16' else ''}, "
        f"{_backend(run.decoder)} backend, {torch.get_num_threads()} threads; run folder {run.folder}"
    )
