"""``zerogap train`` from the command line: the gap, the gate and its incident, repeatability, resume."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zerogap.engine.forward
import zerogap.engine.trace
import zerogap.rl.command
import zerogap.rl.loop
import zerogap.rl.setup
from zerogap.cli import run
from zerogap.models.rows import Rows
from zerogap.ops import backend
from zerogap.rl.samples import read_samples, samples_path
from zerogap.rl.setup import Run, set_up
from zerogap.trainer import RunState
from zerogap.trainer.fingerprint import describe_numerics

native = pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
QUICKSTART_BYTES = (Path(zerogap.rl.loop.__file__).parents[1] / "data/tiny-qwen3/model.safetensors").stat().st_size
SMALL = (
    "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=4",
    "eval.every=0",
    "engine.num_pages=64",
    "gap.scope=all",
    "reward.workers=1",
)
SAMPLER = ("rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=8", "rollout.min_p=0.05")


@pytest.fixture(autouse=True)
def threads() -> object:
    """The command sets the thread count and the backend of the process; other tests keep theirs."""
    before = torch.get_num_threads()
    with backend.using(backend.cpu_backend()):
        yield
    torch.set_num_threads(before)


def train(folder: Path, *arguments: str, steps: int = 2) -> int:
    return run(["train", str(QUICKSTART), f"run.dir={folder}", f"run.steps={steps}", *SMALL, *arguments])


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, f"one JSON object and nothing else on stdout: {lines}"
    return json.loads(lines[0])


def final_weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors").read_bytes()


def optimiser_state(folder: Path, step: int) -> list[bytes]:
    return [p.read_bytes() for p in sorted((folder / "checkpoints" / f"step-{step:06d}").glob("optimiser-*"))]


def test_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "eval.every=2", "eval.prompts=10", "--json") == 0
    values = result(capsys)
    names = (
        "schema schema_version steps tokens_compared tokens_not_compared tokens_different tokens_nonfinite gap_mean "
        "gap_max reward_first reward_last eval_first eval_last generated_tokens_per_s run_dir"
    )
    assert set(names.split()) <= set(values)
    assert values["steps"] == 2
    assert values["tokens_compared"] > 100
    assert values["tokens_different"] == values["tokens_nonfinite"] == values["tokens_not_compared"] == 0
    assert values["gap_max"] == values["gap_mean"] == 0.0
    assert 0 <= values["eval_first"] <= 1
    assert 0 <= values["eval_last"] <= 1


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("sampler", [(), SAMPLER])
def test_no_token_differs_under_any_sampler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sampler: tuple[str, ...], updates: int
) -> None:
    extra = (f"train.updates_per_rollout={updates}", "rollout.stop=['7']", "rollout.min_tokens=2")
    assert train(tmp_path / "run", *sampler, *extra, "--json") == 0
    values = result(capsys)
    assert values["tokens_different"] == 0
    assert values["tokens_compared"] > 80


def test_dropped_groups_are_counted_unless_the_scope_is_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "gap.scope=trained", "--json") == 0
    values = result(capsys)
    assert values["tokens_not_compared"] > 0
    samples = [record for step in range(2) for record in read_samples(samples_path(tmp_path / "run", step))]
    compared = sum(value is not None for record in samples for value in record["logprobs_trainer"])
    assert compared == values["tokens_compared"]
    assert {record["advantage"] == 0 for record in samples if record["logprobs_trainer"][0] is None} == {True}


def test_a_run_that_compared_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat_reward.py").write_text("def flat(prompt, completion, answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    for scope, warned in (("trained", True), ("all", False)):
        arguments = ("task.reward=flat_reward:flat", f"gap.scope={scope}", "--json")
        assert train(tmp_path / scope, *arguments, steps=1) == (3 if warned else 0)
        captured = capsys.readouterr()
        assert (json.loads(captured.out)["tokens_compared"] == 0) is warned
        assert ("warning: no token was compared" in captured.err) is warned


TURNS = """
from zerogap.rl.custom import Transcript


def turns(context, prompt):
    transcript = Transcript(context.encode_prompt(prompt))
    transcript.add_completion(context.generate(transcript.tokens, max_tokens=4, min_tokens=3))
    transcript.add_tokens(context.encode("+1="))
    transcript.add_completion(context.generate(transcript.tokens, max_tokens=2), train=False)
    transcript.add_tokens(context.encode("7"))
    transcript.add_completion(context.generate(transcript.tokens, max_tokens=5, min_tokens=2, stop=("3",)))
    return transcript


def graded(prompt, completion, answer):
    return float(sum(map(ord, completion)) % 3)
"""


# 24 updates have one sequence each, some of them without advantage.
@pytest.mark.parametrize(("updates", "sampler"), [(1, ()), (24, SAMPLER)])
def test_turns_with_inserted_and_untrained_tokens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sampler: tuple[str, ...],
    updates: int,
) -> None:
    (tmp_path / "turns_of_three.py").write_text(TURNS)
    monkeypatch.chdir(tmp_path)
    extra = (
        "task.rollout=turns_of_three:turns",
        "task.reward=turns_of_three:graded",
        f"train.updates_per_rollout={updates}",
        "model.max_positions=40",
    )
    compared, trained = {}, {}
    for scope in ("trained", "all"):
        folder = tmp_path / scope
        assert train(folder, *sampler, *extra, f"gap.scope={scope}", "--json") == 0
        values = result(capsys)
        assert values["tokens_different"] == 0
        records = [record for step in range(2) for record in read_samples(samples_path(folder, step))]
        compared[scope], trained[scope] = values["tokens_compared"], sum(sum(record["loss_mask"]) for record in records)
        assert compared[scope] == sum(value is not None for r in records for value in r["logprobs_trainer"])
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        sampled = sum(round(line["rollout/response_length/mean"] * 24) for line in lines)
        assert values["tokens_not_compared"] == sampled - compared[scope]
    assert compared["trained"] <= trained["trained"] < compared["all"]
    assert trained["trained"] > 200
    assert values["tokens_not_compared"] == 0
    assert final_weights(tmp_path / "trained", 2) == final_weights(tmp_path / "all", 2)
    assert max(line["train/tokens"] for line in lines) > 50


def test_a_fault_in_a_turn_that_is_not_trained_on_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turns_of_three.py").write_text(TURNS)
    monkeypatch.chdir(tmp_path)

    def spoil(made: Run) -> None:
        step = made.engine.step

        def flipped() -> list:
            events = step()
            for event in events:
                done = event.completion
                if done is not None and done.key == (0, 0, 3) and done.params.max_tokens == 2:  # the second turn
                    done.logprobs[0] += 1e-6
            return events

        made.engine.step = flipped

    with_run(monkeypatch, spoil)
    extra = ("task.rollout=turns_of_three:turns", "model.max_positions=40")
    assert train(tmp_path / "run", *extra, steps=1) == 1
    found = incident(tmp_path / "run")
    assert found["tokens_different"] == 1
    assert found["sequence"] == {"step": 0, "prompt": 0, "sample": 3}
    assert "transient" in found["fault"]["explanation"]


RETRY = """
from zerogap.rl.custom import Transcript


def second_try(context, prompt):
    transcript = Transcript(context.encode_prompt(prompt))
    first, second = context.generate(transcript.tokens), context.generate(transcript.tokens)
    tries.append(first.tokens == second.tokens)
    transcript.add_completion(second)
    return transcript


tries = []
"""


def test_a_second_try_is_another_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "retries.py").write_text(RETRY)
    monkeypatch.chdir(tmp_path)
    extra = ("task.rollout=retries:second_try", "model.max_positions=40", "rollout.temperature=1.5")
    assert train(tmp_path / "run", *extra, steps=1) == 0, "and its tokens are compared as any others"
    tries = sys.modules["retries"].tries
    assert len(tries) == 24
    assert not all(tries)


FILL = """
from zerogap.rl.custom import Transcript


def fill(context, prompt):
    transcript = Transcript(context.encode_prompt(prompt))
    while context.room(transcript.tokens) > 1:
        transcript.add_tokens(context.encode("+"))
        transcript.add_completion(context.generate(transcript.tokens, max_tokens=7, min_tokens=7))
    return transcript
"""


def test_turns_that_outgrow_the_context_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fills.py").write_text(FILL)
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "run", "task.rollout=fills:fill", "model.max_positions=25", "--json", steps=1) == 0
    values = result(capsys)
    assert values["tokens_different"] == values["tokens_not_compared"] == 0
    for record in read_samples(samples_path(tmp_path / "run", 0)):
        assert len(record["prompt_ids"]) + len(record["response_ids"]) == 25
        assert record["loss_mask"] == [False, *[True] * 7, False, *[True] * 7, False, *[True] * 2]
        assert record["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout.temperature=1e-46",), "rollout.temperature: 1e-46 is too small"),
        (("eval.every=1", "eval.max_tokens=5000"), "eval.max_tokens in evaluation = 5000 need"),
        (("rollout.max_tokens=5000",), "rollout.max_tokens = 5000 need"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], said: str
) -> None:
    assert train(tmp_path / "run", *overrides) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_samples_file_gives_the_bits_back(tmp_path: Path) -> None:
    assert train(tmp_path / "run", steps=1) == 0
    records = list(read_samples(samples_path(tmp_path / "run", 0)))
    assert len(records) == 24
    for record in records:
        engine, trainer = (torch.tensor(record[f"logprobs_{side}"]) for side in ("engine", "trainer"))
        assert torch.equal(engine.view(torch.int32), trainer.view(torch.int32))


def with_run(monkeypatch: pytest.MonkeyPatch, change: Callable[[Run], None]) -> None:
    """Let ``change`` spoil a run after it was set up."""

    def spoiled(config: object, resume: str | None) -> Run:
        made = set_up(config, resume)
        change(made)
        return made

    monkeypatch.setattr(zerogap.rl.command, "set_up", spoiled)


def incident(folder: Path) -> dict[str, object]:
    assert (folder / "incident.md").read_text().startswith("# The gap was not 0")
    return json.loads((folder / "incident.json").read_text())


@pytest.mark.parametrize(("layer", "op"), [(2, "down_proj"), (0, "k_norm"), (3, "attention"), (1, "mlp_residual")])
def test_batch_variant_op_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int, op: str) -> None:
    def spoil(made: Run) -> None:
        def hook(at: int, name: str, x: Tensor) -> Tensor:
            # A sum that depends on how many rows run together, as a library's split by row count does.
            return x * (1 + 1e-6 * (x.shape[0] % 7)) if (at, name) == (layer, op) else x

        made.engine.hooks = (hook,)

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run") == 1
    found = incident(tmp_path / "run")
    assert found["step"] == 0
    assert (found["fault"]["layer"], found["fault"]["op"]) == (layer, op)
    assert found["fault"]["side"] == "engine"
    assert found["token"]["word_engine"] != found["token"]["word_trainer"]
    assert not (tmp_path / "run" / "checkpoints").exists(), "the update must not have been applied"


def test_batch_variant_trainer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(made: Run) -> None:
        layer = made.decoder.model.layers[1].mlp
        forward = layer.up_proj.forward
        layer.up_proj.forward = lambda x: forward(x) * (1 + 1e-6 * (x.shape[0] > 50))

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run") == 1
    fault = incident(tmp_path / "run")["fault"]
    assert (fault["layer"], fault["op"], fault["side"]) == (1, "up_proj", "trainer")


@pytest.mark.parametrize("row", [1, -1], ids=["of a shared prompt", "of the last response"])
def test_a_wrong_row_of_the_training_forward_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """One row is wrong: of a prompt that its samples share, or of the last response behind another shared prompt."""

    def spoil(made: Run) -> None:
        layer = made.decoder.model.layers[1].mlp
        forward = layer.up_proj.forward

        def one_row(x: Tensor) -> Tensor:
            factor = torch.ones(len(x), 1)
            factor[row] += 1e-2 * (len(x) > 50)  # not in a sequence alone
            return forward(x) * factor

        layer.up_proj.forward = one_row

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run") == 1
    found = incident(tmp_path / "run")
    fault = found["fault"]
    assert (fault["layer"], fault["op"], fault["side"]) == (1, "up_proj", "trainer")
    records = list(read_samples(samples_path(tmp_path / "run", 0)))
    wrong = [
        (number, place)
        for number, record in enumerate(records)
        for place, pair in enumerate(zip(record["logprobs_engine"], record["logprobs_trainer"], strict=True))
        if pair[0] != pair[1]
    ]
    prompts = {tuple(records[number]["prompt_ids"]) for number, _ in wrong}
    assert len(prompts) == 1, "no other prompt's samples are touched"
    if row == 1:
        assert fault["position"] == 1
        assert len({number for number, _ in wrong}) > 1, "all samples that share the row differ"
    else:
        ((number, place),) = wrong
        assert fault["position"] == len(records[number]["prompt_ids"]) + place - 1


def test_with_more_updates_the_training_forward_is_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scoring pass is sound; the forward with gradient packs other sequences together, and breaks the law."""
    sequences: list[int] = []

    def spoil(made: Run) -> None:
        layer = made.decoder.model.layers[2].mlp
        forward = layer.down_proj.forward
        # Wrong for as many rows as one update of four has: the scoring pass has more, a sequence alone fewer.
        layer.down_proj.forward = lambda x: forward(x) * (1 + 1e-6 * (20 < x.shape[0] < 60))
        accumulate = zerogap.rl.loop.accumulate

        def counted(decoder: object, optimiser: object, some: list, *rest: object) -> object:
            sequences.append(len(some))
            return accumulate(decoder, optimiser, some, *rest)

        monkeypatch.setattr(zerogap.rl.loop, "accumulate", counted)

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run", "train.updates_per_rollout=4", "train.tokens_per_micro_batch=4096", "--json") == 1
    values = result(capsys)
    assert values["steps"] == 0, "stopped before the first update"
    assert sequences == [6], "the scoring pass was equal: the gate let it through"
    samples = list(read_samples(samples_path(tmp_path / "run", 0)))
    assert values["tokens_compared"] == sum(sum(record["loss_mask"]) for record in samples)
    assert 0 < values["tokens_different"] < values["tokens_compared"] / 3
    fault = incident(tmp_path / "run")["fault"]
    assert (fault["layer"], fault["op"], fault["side"]) == (2, "down_proj", "trainer")


def test_stale_weight_in_the_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"

    def spoil(made: Run) -> None:
        load = made.engine.load_weights

        def stale(state: dict[str, Tensor], version: int, digest: str | None = None) -> None:
            weight = made.engine.decoder.state_dict()[name]
            before = weight.clone()
            load(state, version, digest)
            weight.copy_(before)

        made.engine.load_weights = stale

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run", "engine.weights=own", steps=3) == 1
    found = incident(tmp_path / "run")
    assert found["step"] == 1, "the first step after a sync"
    assert (found["fault"]["layer"], found["fault"]["op"]) == (1, "q_proj")
    assert found["fault"]["tensors"] == [name]


@native
def test_a_stale_packed_copy_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A write that torch does not count, after the update: both sides would go on with the old values."""
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(made: Run) -> None:
        changed = made.engine.weights_changed

        def plant(version: int) -> None:
            changed(version)  # the copies are current now
            made.decoder.get_parameter(name).data[3, 3] += 1
            changed(version)

        made.engine.weights_changed = plant

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run", "model.backend=native") == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("zerogap: error: ")]
    assert len(error) == 1
    assert f"weights of version 1: the packed copy of {name} (and 0 more) does not hold the weight" in error[0]


def test_an_update_that_the_engine_is_not_told_of_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(made: Run) -> None:
        made.engine.weights_changed = lambda version: None

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run") == 2
    assert "has changed since the engine took version 0 of the shared weights" in capsys.readouterr().err


def test_an_engine_with_weights_of_its_own_trains_the_same(tmp_path: Path) -> None:
    assert train(tmp_path / "shared") == train(tmp_path / "own", "engine.weights=own") == 0
    assert final_weights(tmp_path / "shared", 2) == final_weights(tmp_path / "own", 2)
    assert optimiser_state(tmp_path / "shared", 2) == optimiser_state(tmp_path / "own", 2)


@native
@pytest.mark.parametrize("weights", ["shared", "own"])
def test_weights_in_bfloat16_have_no_gap_and_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    mode = ("model.backend=native", "model.weights=bfloat16", f"engine.weights={weights}")
    assert train(tmp_path / "run", *mode, "--json") == 0
    values = result(capsys)
    assert values["tokens_different"] == 0 < values["tokens_compared"]
    assert json.loads((tmp_path / "run" / "numerics.json").read_text())["weights"] == "bfloat16"
    assert 'weights = "bfloat16"' in (tmp_path / "run" / "config.toml").read_text()
    assert train(tmp_path / "float32", "model.backend=native") == 0
    assert final_weights(tmp_path / "run", 2) != final_weights(tmp_path / "float32", 2)
    assert train(tmp_path / "run", *mode, "--resume", "auto", steps=3) == 0
    assert train(tmp_path / "straight", *mode, steps=3) == 0
    assert final_weights(tmp_path / "run", 3) == final_weights(tmp_path / "straight", 3)
    capsys.readouterr()
    assert train(tmp_path / "run", "model.backend=native", "--resume", "auto", steps=4) == 2
    assert "model.weights" in capsys.readouterr().err, "a run does not change its mode"


@pytest.mark.parametrize("weights", ["shared", "own"])
def test_a_model_in_bfloat16_has_no_gap_and_resumes_with_its_masters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    mode = ("model.dtype=bfloat16", f"engine.weights={weights}")
    assert train(tmp_path / "run", *mode, "--json") == 0
    values = result(capsys)
    assert values["tokens_different"] == 0 < values["tokens_compared"]
    numerics = json.loads((tmp_path / "run" / "numerics.json").read_text())
    assert (numerics["dtype"], numerics["backend"]) == ("bfloat16", "portable")
    first = final_weights(tmp_path / "run", 2)
    assert train(tmp_path / "run", *mode, "--resume", "auto", steps=4) == 0
    assert train(tmp_path / "straight", *mode, steps=4) == 0
    assert first != final_weights(tmp_path / "run", 4) == final_weights(tmp_path / "straight", 4)
    assert optimiser_state(tmp_path / "run", 4) == optimiser_state(tmp_path / "straight", 4)
    assert len(first) < QUICKSTART_BYTES * 0.51, "two bytes a weight"
    capsys.readouterr()
    assert train(tmp_path / "run", "--resume", "auto", steps=5) == 2
    assert "model.dtype" in capsys.readouterr().err, "a run does not change its format"


def test_a_weight_that_is_not_the_rounded_master_is_refused_at_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path / "run", "model.dtype=bfloat16", steps=1) == 0
    honest = zerogap.rl.setup.load_weights

    def other(*arguments: object) -> object:
        decoder = honest(*arguments)  # type: ignore[arg-type]
        with torch.no_grad():
            decoder.model.norm.weight[0] += 1
        return decoder

    monkeypatch.setattr(zerogap.rl.setup, "load_weights", other)
    assert train(tmp_path / "run", "model.dtype=bfloat16", "--resume", "auto") == 2
    assert "the master of model.norm.weight does not round to the weight" in capsys.readouterr().err


@pytest.mark.slow
def test_a_kill_of_a_run_in_bfloat16_costs_no_bit(tmp_path: Path) -> None:
    """Killed by the system after some checkpoint, in a process of its own, then resumed to the end."""
    mode = ("model.dtype=bfloat16", "run.checkpoint_every=1")
    command = [sys.executable, "-m", "zerogap", "train", str(QUICKSTART), *SMALL, *mode]
    running = subprocess.Popen([*command, f"run.dir={tmp_path / 'run'}", "run.steps=60"], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "run" / "checkpoints" / "step-000002").exists(), running)
    finally:
        running.kill()
        running.wait()
    newest = max(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    steps = newest + 2
    assert train(tmp_path / "run", *mode, "--resume", "auto", steps=steps) == 0
    assert train(tmp_path / "straight", *mode, steps=steps) == 0
    assert final_weights(tmp_path / "run", steps) == final_weights(tmp_path / "straight", steps)
    assert optimiser_state(tmp_path / "run", steps) == optimiser_state(tmp_path / "straight", steps)


def wait_until(true: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 240
    while not true():
        assert running.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.05)


@native
def test_float32_on_one_side_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(made: Run) -> None:
        made.engine.decoder.compute_with("float32")

    with_run(monkeypatch, spoil)
    mode = ("model.backend=native", "model.weights=bfloat16", "engine.weights=own")
    assert train(tmp_path / "run", *mode) == 1
    fault = incident(tmp_path / "run")["fault"]
    assert fault["op"] == "embedding"
    assert "model.embed_tokens.weight" in fault["tensors"]


def test_weights_in_bfloat16_are_refused_by_the_portable_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with backend.using("portable"):
        assert train(tmp_path / "run", "model.backend=portable", "model.weights=bfloat16") == 2
    error = capsys.readouterr().err
    assert "model.weights = 'bfloat16': the portable" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_shifted_position_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(Rows):
        @staticmethod
        def build(sequences: list, page_size: int) -> Rows:
            rows = Rows.build(sequences, page_size)
            rows.positions_R.add_((rows.positions_R >= 6).to(torch.int64))
            return rows

    monkeypatch.setattr(zerogap.engine.forward, "Rows", Shifted)
    monkeypatch.setattr(zerogap.engine.trace, "Rows", Shifted)
    assert train(tmp_path / "run") == 1
    fault = incident(tmp_path / "run")["fault"]
    assert (fault["layer"], fault["op"], fault["side"]) == (0, "q_rotary", "engine")
    assert fault["position"] >= 6


def test_altered_record_is_called_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(made: Run) -> None:
        step = made.engine.step

        def flipped() -> list:
            events = step()
            for event in events:
                if event.completion is not None and event.key == (0, 1, 1):
                    event.completion.logprobs[1] += 1e-6
            return events

        made.engine.step = flipped

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run") == 1
    found = incident(tmp_path / "run")
    assert found["tokens_different"] == 1
    assert found["sequence"] == {"step": 0, "prompt": 1, "sample": 1}
    assert found["token"]["index"] == 1
    assert found["fault"]["op"] is None
    assert "transient" in found["fault"]["explanation"]


def test_nan_is_different_and_never_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(made: Run) -> None:
        def hook(at: int, name: str, x: Tensor) -> Tensor:
            return torch.where(x == x[0, 0], torch.nan, x) if (at, name) == (1, "o_proj") else x

        made.engine.hooks = (hook,)

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run", "--json") == 1
    values = result(capsys)
    assert values["tokens_nonfinite"] > 0
    assert values["tokens_different"] >= values["tokens_nonfinite"]
    assert values["gap_max"] == values["gap_mean"] == "nan"


def test_weights_that_broke_on_both_sides_are_no_fault_of_an_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose weights diverged gives NaN on both sides: stopped, and not blamed on the arithmetic."""

    def spoil(made: Run) -> None:
        for decoder in (made.engine.decoder, made.decoder):
            decoder.model.layers[2].mlp.up_proj.weight.data[3] = torch.nan

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run") == 1
    found = incident(tmp_path / "run")
    assert found["tokens_nonfinite"] == found["tokens_different"] > 0
    assert (found["fault"]["op"], found["fault"]["side"]) == (None, None)
    assert "agree on a value that is not finite" in found["fault"]["explanation"]


def test_warn_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(made: Run) -> None:
        made.engine.hooks = (lambda at, name, x: x * 1.0001 if (at, name) == (0, "o_proj") else x,)

    with_run(monkeypatch, spoil)
    assert train(tmp_path / "run", "gap.gate=warn", "--json") == 0
    values = result(capsys)
    assert values["steps"] == 2
    assert values["tokens_different"] > 0
    assert incident(tmp_path / "run")["fault"]["op"] == "o_proj"


def test_the_incident_of_an_earlier_start_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(made: Run) -> None:
        made.engine.hooks = (lambda at, name, x: x * 1.0001 if (at, name) == (0, "o_proj") else x,)

    assert train(tmp_path / "run", steps=1) == 0
    with monkeypatch.context() as patch:
        with_run(patch, spoil)
        assert train(tmp_path / "run", "--resume", "auto", steps=2) == 1
    stopped = incident(tmp_path / "run")
    capsys.readouterr()
    assert train(tmp_path / "run", "--resume", "auto", "--json", steps=2) == 0
    assert result(capsys)["incident"] is None
    names = sorted(path.name for path in (tmp_path / "run").glob("incident*"))
    assert names == ["incident-before-step-1.json", "incident-before-step-1.md"]
    assert json.loads((tmp_path / "run" / names[0]).read_text()) == stopped


def test_same_run_twice_gives_the_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert train(tmp_path / name, *SAMPLER) == 0
    assert final_weights(tmp_path / "a", 2) == final_weights(tmp_path / "b", 2)
    assert optimiser_state(tmp_path / "a", 2) == optimiser_state(tmp_path / "b", 2)


@pytest.mark.parametrize("updates", [1, 2])
def test_resume_ends_in_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], updates: int) -> None:
    extra = (f"train.updates_per_rollout={updates}", "--json")
    assert train(tmp_path / "whole", *extra, steps=6) == 0
    whole = result(capsys)
    assert train(tmp_path / "parts", *extra, steps=3) == 0
    capsys.readouterr()
    assert train(tmp_path / "parts", *extra, "--resume", "auto", steps=6) == 0
    parts = result(capsys)
    assert final_weights(tmp_path / "whole", 6) == final_weights(tmp_path / "parts", 6)
    assert optimiser_state(tmp_path / "whole", 6) == optimiser_state(tmp_path / "parts", 6)
    timed = {"generated_tokens_per_s", "run_dir"}
    assert {k: v for k, v in parts.items() if k not in timed} == {k: v for k, v in whole.items() if k not in timed}
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(6))


def test_a_kill_beside_a_checkpoint_loses_no_line_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = zerogap.rl.loop.save_checkpoint

    def killed_before_or_after(folder: Path, state: RunState, *rest: object) -> Path:
        if state.step == 2:
            raise KeyboardInterrupt
        save(folder, state, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(zerogap.rl.loop, "save_checkpoint", killed_before_or_after)
    for _ in range(2):
        assert train(tmp_path / "run", "run.checkpoint_every=1", "--resume", "auto", steps=3) == 2
    monkeypatch.undo()
    assert train(tmp_path / "run", "run.checkpoint_every=1", "--resume", "auto", steps=3) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_engine_batching_does_not_change_the_weights(tmp_path: Path) -> None:
    assert train(tmp_path / "a") == 0
    other = ("engine.max_rows_per_step=7", "engine.page_size=3", "engine.num_pages=20", "engine.max_sequences=5")
    assert train(tmp_path / "b", *other, "engine.prefix_cache=false") == 0
    assert final_weights(tmp_path / "a", 2) == final_weights(tmp_path / "b", 2)


def test_resume_needs_the_same_numerics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", steps=1) == 0
    assert train(tmp_path / "run", "--resume", "auto", "train.learning_rate=0.5", steps=2) == 2
    assert "learning_rate" in capsys.readouterr().err


def test_a_checkpoint_of_another_configuration_is_refused_wherever_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", steps=1) == 0
    other = str(tmp_path / "run" / "checkpoints" / "step-000001")
    assert train(tmp_path / "new", "run.seed=5", "--resume", other) == 2
    assert "run.seed: 0, now 5" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert train(tmp_path / "mine", "run.seed=5", steps=1) == 0
    assert train(tmp_path / "mine", "run.seed=5", "--resume", other) == 2
    assert "run.seed: 0, now 5" in capsys.readouterr().err
    assert train(tmp_path / "copy", "--resume", other) == 0, "the same configuration in another folder"


def test_a_changed_data_set_is_refused_at_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data, line = tmp_path / "data.jsonl", '{"prompt": "12+34=", "answer": "46"}\n'
    data.write_text(line)
    task = ("task.name=jsonl", "task.path=data.jsonl", "task.reward=zerogap.rl.tasks.scoring:exact_match")
    assert train(tmp_path / "run", *task, steps=1) == 0
    data.write_text(line.replace("46", "47"))
    assert train(tmp_path / "run", *task, "--resume", "auto") == 2
    assert "the training prompts are not those of the run" in capsys.readouterr().err
    data.write_text(line)
    assert train(tmp_path / "run", *task, "--resume", "auto") == 0


def test_resume_where_the_bits_differ_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", steps=1) == 0
    monkeypatch.setattr(
        zerogap.rl.setup, "describe_numerics", lambda *which: describe_numerics(*which) | {"fingerprint": "other bits"}
    )
    assert train(tmp_path / "run", "--resume", "auto", steps=2) == 2
    error = capsys.readouterr().err
    assert "does not keep the run's bits" in error
    assert "fingerprint" in error
