"""Checkpoints on disk: complete or absent, verified, pruned."""

import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from flowcorr.errors import CheckpointError
from flowcorr.trainer import checkpoint
from flowcorr.trainer.checkpoint import TrainingState, UnreadableError


def state(step=10, value=1.0):
    tensors = {"weights/a": torch.full((3,), value), "optimizer/a.step": torch.tensor(float(step))}
    return TrainingState(step=step, tensors=tensors, facts={"version": step, "best": [0, 0.5]})


def write_adapter(folder):
    (folder / "adapter.bin").write_bytes(b"adapter")


def save(root, *steps):
    return [checkpoint.save(root, state(step), write_adapter) for step in steps][-1]


def names(root):
    return [path.name for path in checkpoint.folders(root)]


def test_what_is_saved_is_loaded(tmp_path):
    folder = save(tmp_path / "checkpoints", 10)
    loaded = checkpoint.load(folder)
    assert folder.name == "step_000010"
    assert (loaded.step, loaded.facts) == (10, {"version": 10, "best": [0, 0.5]})
    assert loaded.group("weights")["a"].tolist() == [1, 1, 1]
    assert list(loaded.group("optimizer")) == ["a.step"]
    assert loaded.group("ema") == {}


def rewrite(folder, **facts):
    """Change facts of a checkpoint as another version of flowcorr would have written them; None leaves one out."""
    path, manifest = folder / "state.json", folder / "manifest.json"
    changed = {**json.loads(path.read_text()), **facts}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    digests = json.loads(manifest.read_text()) | {"state.json": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(digests))


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (4, "format 4, .*format 3: a newer"),
        (1, "format 1, .*format 3: an older .*model.lora.warm_start"),
        (None, "no format, .*format 3: an older"),
        (0, "format 0, .*format 3: an older"),
        ("2", "format 2, .*format 3: an older"),
    ],
)
def test_another_format_is_named_and_never_passed_over(tmp_path, found, named):
    """The checkpoint before it is not used: training from there would delete this one."""
    save(tmp_path, 2)
    folder = save(tmp_path, 3)
    rewrite(folder, format=found)
    for load, place in ((checkpoint.load, folder), (checkpoint.load_latest, tmp_path)):
        with pytest.raises(UnreadableError, match=f"step_000003 has {named}"):
            load(place)
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_a_newer_format_may_have_other_files(tmp_path):
    folder = save(tmp_path, 3)
    rewrite(folder, format=checkpoint.FORMAT + 1)
    (folder / "state.safetensors").rename(folder / "state_0.safetensors")
    (folder / "manifest.json").unlink()
    with pytest.raises(UnreadableError, match=f"step_000003 .*format {checkpoint.FORMAT + 1}, .*newer"):
        checkpoint.load_latest(tmp_path)


def test_folders_are_ordered_by_step_and_partial_ones_are_none(tmp_path):
    save(tmp_path, 2, 10, 1_000_000)
    (tmp_path / ".partial_step_000011").mkdir()
    (tmp_path / "step_000012").write_text("a file")
    assert names(tmp_path) == ["step_000002", "step_000010", "step_1000000"]
    assert checkpoint.load_latest(tmp_path)[1].step == 1_000_000
    assert checkpoint.steps(tmp_path) == [2, 10, 1_000_000]
    assert checkpoint.folders(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json", "adapter.bin"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered", "empty"])
def test_a_damaged_file_is_found(tmp_path, name, damage):
    path = save(tmp_path, 10) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        altered = bytes([content[-1] ^ 1])
        path.write_bytes({"truncated": content[:-1], "altered": content[:-1] + altered, "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=f"step_000010 is damaged.*: {name} "):
        checkpoint.load(path.parent)


@pytest.mark.parametrize("manifest", ["[]", "{}", "null", '{"state.json": 3}', '{"../x": "y"}'])
def test_a_manifest_of_another_kind_is_damage(tmp_path, manifest):
    folder = save(tmp_path, 10)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="step_000010 is damaged"):
        checkpoint.load(folder)


def test_the_newest_intact_one_is_loaded_and_the_others_are_named(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step_000003" / "state.json").unlink()
    (tmp_path / "step_000002" / "manifest.json").write_text("{")
    folder, loaded = checkpoint.load_latest(tmp_path)
    assert (folder.name, loaded.step) == ("step_000001", 1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    for name in ("step_000003", "step_000002"):
        assert f"{name} is damaged" in caplog.text
    assert ["step_000001" in text for text in caplog.messages] == [True, True]


def test_one_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    def refuse(path, *arguments, **named):
        if path == newest / "state.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **named)

    _, newest, open_file = save(tmp_path, 1), save(tmp_path, 2), Path.open
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableError, match=r"step_000002 .*Permission denied: '.*state\.safetensors'"):
        checkpoint.load_latest(tmp_path)
    monkeypatch.undo()
    assert checkpoint.load_latest(tmp_path)[1].step == 2


def test_no_intact_one_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=f"^{tmp_path} holds no"):
        checkpoint.load_latest(tmp_path)
    (save(tmp_path, 1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"intact; .*step_000001 .*: state\.json "):
        checkpoint.load_latest(tmp_path)


def test_saving_clears_what_a_killed_process_left(tmp_path):
    for leftover in (".partial_step_000001", ".partial_step_000007.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "state.json").write_text("{}")
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000008"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5)
    checkpoint.save(tmp_path, state(5, value=2.0), write_adapter)
    assert checkpoint.load_latest(tmp_path)[1].group("weights")["a"].tolist() == [2, 2, 2]


def test_a_kill_while_a_step_is_replaced_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, state(5, value=2.0), write_adapter)
    assert checkpoint.load_latest(tmp_path)[1].group("weights")["a"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("keep", "best", "left"), [(2, None, [4, 5]), (2, 2, [2, 4, 5]), (1, 5, [5]), (9, 1, [1, 2, 3, 4, 5])]
)
def test_prune_keeps_the_newest_and_the_best(tmp_path, keep, best, left):
    save(tmp_path, 1, 2, 3, 4, 5)
    checkpoint.prune(tmp_path, keep=keep, best=best)
    assert names(tmp_path) == [f"step_{step:06d}" for step in left]
    assert len(list(tmp_path.iterdir())) == len(left)


def test_folders_of_other_names_are_left_alone(tmp_path):
    save(tmp_path, 1, 2, 3)
    others = {"step_000001_keep", "step_000009_keep", "step_", "step_-1", "step_last"}
    for name in others:
        shutil.copytree(tmp_path / "step_000001", tmp_path / name)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000003"]
    checkpoint.prune(tmp_path, keep=2, best=None)
    checkpoint.discard_after(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_000002", *others}
    assert checkpoint.load_latest(tmp_path)[0].name == "step_000002"


def test_what_cannot_be_deleted_yet_stops_nothing(tmp_path, caplog, monkeypatch):
    """NFS keeps a deleted file, and with it the folder, as long as somebody reads it."""
    delete = os.unlink

    def keep_open(path, **options):
        if path == "adapter.bin":
            raise OSError(16, "Device or resource busy")
        delete(path, **options)

    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", keep_open)
        checkpoint.prune(tmp_path, keep=1, best=None)
        assert ".partial_step_000001.old" in caplog.text
        save(tmp_path, 3)
    assert names(tmp_path) == ["step_000002", "step_000003"]
    save(tmp_path, 4)
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{step:06d}" for step in (2, 3, 4)}


def test_a_checkpoint_that_cannot_be_renamed_yet_stops_nothing(tmp_path, caplog, monkeypatch):
    def busy(path, target):
        raise OSError(16, "Device or resource busy")

    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        checkpoint.prune(tmp_path, keep=1, best=None)
        checkpoint.discard_after(tmp_path, 1)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    first, second = caplog.messages
    assert "step_000001 could not be deleted" in first
    assert "step_000002 could not be deleted" in second
    checkpoint.prune(tmp_path, keep=1, best=None)
    assert names(tmp_path) == ["step_000002"]


def test_a_full_disk_leaves_the_previous_one(tmp_path):
    save(tmp_path, 1)
    large = TrainingState(step=2, tensors={"weights/a": torch.zeros(100_000)}, facts={})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 .*step_000001\."):
            checkpoint.save(tmp_path, large, write_adapter)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoint.load_latest(tmp_path)[1].step == 1


def test_an_adapter_that_cannot_be_written_leaves_the_previous_one(tmp_path):
    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 10 .*\[Errno 28\].* none\."):
        checkpoint.save(tmp_path / "checkpoints", state(), full)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="step 1 .*Permission denied"):
            save(tmp_path / "checkpoints", 1)
    finally:
        tmp_path.chmod(0o700)


def test_a_copied_checkpoint_is_intact(tmp_path):
    copied = shutil.copytree(save(tmp_path / "a", 3), tmp_path / "b" / "step_000003")
    assert checkpoint.load(copied).step == 3


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_not_waited_for(name, make, tmp_path):
    folder = save(tmp_path, 3)
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(CheckpointError, match=f"step_000003 .*: {name} .*no file$"):
        checkpoint.load(folder)


def test_a_manifest_that_names_a_device_is_not_read(tmp_path):
    folder = save(tmp_path, 3)
    digests = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(digests | {"/dev/zero": ""}))
    with pytest.raises(CheckpointError, match="step_000003 .*: /dev/zero "):
        checkpoint.load(folder)


def test_the_configuration_in_a_checkpoint_is_its_owners(tmp_path):
    assert (save(tmp_path, 3) / "state.json").stat().st_mode & 0o777 == 0o600


def test_write_text_is_whole_or_absent(tmp_path):
    path = tmp_path / "note.txt"
    checkpoint.write_text(path, "first")
    assert path.stat().st_mode & 0o777 == 0o600
    checkpoint.write_text(path, json.dumps("ä"))
    assert path.read_text() == '"\\u00e4"'
    assert list(tmp_path.iterdir()) == [path]
