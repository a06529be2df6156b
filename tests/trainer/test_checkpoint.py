import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import config_values, random_decoder, same_bits
from tests.trainer.support import draw_sequences, record_logprobs
from zerogap.errors import ExitCode, UsageError
from zerogap.models.weights import weights_digest
from zerogap.trainer import checkpoint as checkpoints_module
from zerogap.trainer.checkpoint import (
    RunState,
    checkpoints,
    latest,
    load_weights,
    numerics_differences,
    open_checkpoint,
    restore_optimiser,
    save_checkpoint,
)
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings
from zerogap.trainer.step import StepSettings, accumulate

SETTINGS = OptimiserSettings(1e-2, weight_decay=0.1, schedule="cosine", warmup_updates=1, total_updates=8)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text(json.dumps(config_values()))
    return folder


def train(decoder, optimiser, updates):
    for update in updates:
        sequences = record_logprobs(decoder, draw_sequences(4, seed=update))
        accumulate(decoder, optimiser, sequences, StepSettings())
        optimiser.apply()


def save(run, source, decoder, optimiser, step, keep=3, **extra):
    state = RunState(step, optimiser.updates, "c0ffee", weights_digest(decoder.state_dict()), {"threads": 1}, extra)
    return save_checkpoint(run, state, decoder, source, optimiser, keep)


@pytest.fixture(scope="module")
def template(tmp_path_factory, source):
    run = tmp_path_factory.mktemp("template") / "run"
    decoder = random_decoder()
    optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
    train(decoder, optimiser, [0])
    save(run, source, decoder, optimiser, 1)
    save(run, source, decoder, optimiser, 2, prompts_seen=8, reward=0.1 + 0.2)
    return run


@pytest.fixture
def saved(tmp_path, template):
    """A run with checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(template, tmp_path / "run"))


def assert_same_state(first, second):
    one, two = first.state_tensors(), second.state_tensors()
    assert one.keys() == two.keys()
    assert all(same_bits(one[name], two[name]) for name in one)
    assert first.updates == second.updates


def test_six_updates_equal_three_and_resume_and_three(tmp_path, source):
    straight = random_decoder()
    train(straight, Optimiser(straight.named_parameters(), SETTINGS), range(6))

    first = random_decoder()
    optimiser = Optimiser(first.named_parameters(), SETTINGS)
    train(first, optimiser, range(3))
    folder = save(tmp_path / "run", source, first, optimiser, 3)

    found = open_checkpoint(folder)
    second = load_weights(found)
    resumed = Optimiser(second.named_parameters(), SETTINGS)
    restore_optimiser(found, resumed)
    assert_same_state(resumed, optimiser)
    train(second, resumed, range(3, 6))
    assert weights_digest(second.state_dict()) == weights_digest(straight.state_dict())
    # Negative control: without the moments the weights part.
    control = load_weights(found)
    train(control, Optimiser(control.named_parameters(), SETTINGS), range(3, 6))
    assert weights_digest(control.state_dict()) != weights_digest(straight.state_dict())


def test_a_run_that_went_back_keeps_what_it_writes(saved, source):
    """By number alone the abandoned later steps would be the newest, and the checkpoint just written would go."""
    decoder = random_decoder()
    optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
    for step in (3, 4, 5):
        save(saved, source, decoder, optimiser, step, keep=9)
    target = save(saved, source, decoder, optimiser, 3, keep=2)
    assert target.is_dir()
    assert [folder.name for folder in checkpoints(saved)] == ["step-000002", "step-000003"]
    assert latest(saved) == target


def test_state_comes_back_as_it_was(saved):
    state = open_checkpoint(saved / "checkpoints/step-000002").state
    assert (state.step, state.updates, state.config_digest, state.numerics) == (2, 1, "c0ffee", {"threads": 1})
    assert state.extra == {"prompts_seen": 8, "reward": 0.1 + 0.2}


def test_the_newest_k_stay(saved, source):
    decoder = random_decoder()
    optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
    assert latest(saved) == saved / "checkpoints/step-000002"
    save(saved, source, decoder, optimiser, 1234567, keep=2)
    assert [folder.name for folder in checkpoints(saved)] == ["step-000002", "step-1234567"]
    assert sorted(os.listdir(saved / "checkpoints")) == ["step-000002", "step-1234567"]
    assert latest(saved / "nowhere") is None


def test_the_same_step_again_replaces_it(saved, source):
    decoder = random_decoder(seed=7)
    save(saved, source, decoder, Optimiser(decoder.named_parameters(), SETTINGS), 2)
    found = open_checkpoint(saved / "checkpoints/step-000002")
    assert found.state.weights_digest == weights_digest(decoder.state_dict())
    assert sorted(os.listdir(saved / "checkpoints")) == ["step-000001", "step-000002"]


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_holds_what_is_documented(saved):
    assert files_of(latest(saved)) == [
        "manifest.json",
        "model/config.json",
        "model/model.safetensors",
        "optimiser-00001-of-00001.safetensors",
        "state.json",
    ]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_every_damaged_file_is_refused_by_name(saved, damage):
    folder = latest(saved)
    for name in files_of(folder):
        path = folder / name
        whole = path.read_bytes()
        for place in (0, len(whole) // 3, len(whole) - 1):
            if damage == "truncate":
                path.write_bytes(whole[:place])
            elif damage == "flip":
                path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            else:
                path.unlink(missing_ok=True)
            with pytest.raises(UsageError) as caught:
                open_checkpoint(folder)
            text = str(caught.value)
            assert "\n" not in text
            assert f"--resume {saved / 'checkpoints/step-000001'}" in text
            assert name == "manifest.json" or name in text, text
        path.write_bytes(whole)
    open_checkpoint(folder)


def test_a_file_that_was_added_is_refused(saved):
    (latest(saved) / "model" / "extra.py").write_text("print()")
    with pytest.raises(UsageError, match=r"model/extra\.py is not in its manifest"):
        open_checkpoint(latest(saved))


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(UsageError, match=r"no checkpoint in .*: manifest\.json: No such file"):
        open_checkpoint(tmp_path)


def test_weights_of_another_state_are_refused(saved):
    found = open_checkpoint(latest(saved))
    other = dataclasses.replace(found, state=dataclasses.replace(found.state, weights_digest="0" * 64))
    with pytest.raises(UsageError, match="other digest"):
        load_weights(other)


def test_an_optimiser_of_another_model_is_refused(saved):
    decoder = random_decoder("llama")
    with pytest.raises(UsageError, match="fits no parameter of this model"):
        restore_optimiser(open_checkpoint(latest(saved)), Optimiser(decoder.named_parameters(), SETTINGS))


def test_state_in_several_files(saved, source, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "_SHARD_BYTES", 30_000)
    decoder = random_decoder()
    optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
    train(decoder, optimiser, [0])
    found = open_checkpoint(save(saved, source, decoder, optimiser, 3))
    shards = [name for name in files_of(found.folder) if name.startswith("optimiser-")]
    assert len(shards) > 3
    back = Optimiser(decoder.named_parameters(), SETTINGS)
    restore_optimiser(found, back)
    assert_same_state(back, optimiser)


def assert_untouched(run):
    assert sorted(os.listdir(run / "checkpoints")) == ["step-000001", "step-000002"]
    open_checkpoint(latest(run))


@pytest.mark.parametrize("place", ["_save_optimiser", "save_decoder", "fsync", "_fingerprint"])
def test_a_full_disk_leaves_the_earlier_checkpoints(saved, source, monkeypatch, place):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    decoder = random_decoder()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, place, full)
        with pytest.raises(UsageError, match="step-000003: the disk is full; nothing of it was kept") as caught:
            save(saved, source, decoder, Optimiser(decoder.named_parameters(), SETTINGS), 3)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    assert_untouched(saved)


@pytest.mark.parametrize("room", [100_000, 500_000])
def test_a_disk_that_really_is_full(saved, source, tmp_path, room):
    """Full while the model is written, and full while the optimiser's state is."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        decoder = random_decoder()
        optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
        train(decoder, optimiser, [0])
        with pytest.raises(UsageError, match="the disk is full"):
            save(disk, source, decoder, optimiser, 1)
        assert os.listdir(disk / "checkpoints") == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_cannot_be_written(saved, source, tmp_path):
    (tmp_path / "file").write_text("")
    decoder = random_decoder()
    with pytest.raises(UsageError, match=r"cannot save checkpoint .*Not a directory"):
        save(tmp_path / "file", source, decoder, Optimiser(decoder.named_parameters(), SETTINGS), 1)


def test_an_interrupt_while_saving_leaves_nothing(saved, source, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    decoder = random_decoder()
    monkeypatch.setattr(checkpoints_module, "_save_optimiser", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(saved, source, decoder, Optimiser(decoder.named_parameters(), SETTINGS), 3)
    assert_untouched(saved)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support import random_decoder
from tests.trainer.test_checkpoint import SETTINGS, save
from zerogap.trainer.optimiser import Optimiser

run, source, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
seen = 0

def audit(event, arguments):
    # Every opened, renamed or removed file is a moment at which the process may die.
    global seen
    if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir") and str(run) in str(arguments[0]):
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

decoder = random_decoder(seed=3)
optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
sys.addaudithook(audit)
save(run, source, decoder, optimiser, 3, keep=2)
"""


def kill_while_saving(saved, source, kill_at):
    """Return whether the saving process was killed at its ``kill_at``-th file operation, else it came to its end."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLED, saved, source, str(kill_at)], env=environment, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0


def assert_only_whole_checkpoints(saved, source):
    names = [folder.name for folder in checkpoints(saved)]
    assert names in (
        ["step-000001", "step-000002"],
        ["step-000001", "step-000002", "step-000003"],
        ["step-000002", "step-000003"],
    )
    for folder in checkpoints(saved):
        load_weights(open_checkpoint(folder))
    decoder = random_decoder(seed=3)
    save(saved, source, decoder, Optimiser(decoder.named_parameters(), SETTINGS), 3, keep=2)
    assert sorted(os.listdir(saved / "checkpoints")) == ["step-000002", "step-000003"], "leftovers were not swept"


@pytest.mark.parametrize("kill_at", [3, 20])
def test_kill_while_saving(saved, source, kill_at):
    assert kill_while_saving(saved, source, kill_at)
    assert_only_whole_checkpoints(saved, source)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_at_every_file_operation_of_a_save(tmp_path, saved, source):
    kept, kill_at = tmp_path / "kept", 0
    shutil.copytree(saved, kept)
    while kill_while_saving(saved, source, kill_at):
        assert_only_whole_checkpoints(saved, source)
        shutil.rmtree(saved)
        shutil.copytree(kept, saved)
        kill_at += 1
    assert kill_at > 20


def test_numerics_differences_are_named():
    saved, now = (
        {"torch": "2.13.0", "threads": 2, "cpu": "AVX2"},
        {"torch": "2.13.0", "threads": 4, "backend": "portable"},
    )
    assert numerics_differences(saved, now) == [
        "backend: saved absent, now portable",
        "cpu: saved AVX2, now absent",
        "threads: saved 2, now 4",
    ]
    assert numerics_differences(saved, dict(saved)) == []
