"""Files of dumped steps that hold what they must not: each is refused in one line, and runs nothing."""

import json
import os
import struct
from dataclasses import fields

import numpy as np
import pytest
import torch

import flowcorr
from flowcorr import dumps
from flowcorr.dumps import checks
from flowcorr.errors import BatchError, ConfigError
from tests.odd_files import BATCH, good_tensors, write_step

WINDOW = torch.zeros(BATCH, 2)
ROWS = torch.zeros(BATCH)


def refusal(path, load=dumps.load):
    """The one line that `load` refuses a file with."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 1000
    return message


def test_a_good_file_is_read(tmp_path):
    path = write_step(tmp_path)
    assert dumps.load(path).num_elements == 64
    assert dumps.load_loss(path).clip_ratio == 1e-3


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"loss_mode": None}, "loss_mode is missing from its metadata; it must be a name"),
        ({"loss_mode": ""}, "loss_mode='' must be a name"),
        ({"loss_mode": "red \x1b[31m"}, r"loss_mode='red \x1b[31m' must be a name"),
        ({"mode": None}, "mode is missing from its metadata; it must be decoupled or bypass"),
        ({"mode": "Bypass"}, "mode='Bypass' must be decoupled or bypass"),
        ({"step": None}, "step is missing from its metadata"),
        ({"step": "one"}, "step='one' must be a whole number below 1e12"),
        ({"step": "7"}, "step='7' is not the step of its name"),
        ({"num_elements": "many"}, "num_elements='many' must be a whole number from 1, below 1e12"),
        ({"num_elements": "-5"}, "num_elements='-5'"),
        ({"num_elements": "0"}, "num_elements='0'"),
        ({"num_elements": "1.5"}, "num_elements='1.5'"),
        ({"num_elements": "9" * 5000}, "num_elements='999"),
        ({"num_elements": "٣"}, "num_elements='٣'"),
        (
            {"clip_ratio": "small"},
            "clip_ratio='small' must be a number above 0, at most 3.40282e+38, or a list of such numbers",
        ),
        ({"clip_ratio": '{"low": 1}'}, "clip_ratio='{\"low\": 1}'"),
        ({"clip_ratio": "[]"}, "clip_ratio='[]'"),
        ({"clip_ratio": "[1e-3, null]"}, "clip_ratio='[1e-3, null]'"),
        ({"clip_ratio": "true"}, "clip_ratio='true'"),
        ({"clip_ratio": "-0.1"}, "clip_ratio='-0.1'"),
        ({"clip_ratio": "NaN"}, "clip_ratio='NaN'"),
        ({"clip_ratio": "1e400"}, "clip_ratio='1e400'"),
        ({"clip_ratio": "1e39"}, "clip_ratio='1e39'"),
        ({"clip_ratio": "1" * 400}, "clip_ratio='111"),
        ({"clip_ratio": "1" * 5000}, "clip_ratio='111"),
        ({"clip_ratio": "[" * 10**5}, "clip_ratio='[[["),
        ({"clip_ratio": "[" * 2**15 + "]" * 2**15}, "clip_ratio='[[["),
        ({"adv_clip_max": "much"}, "adv_clip_max='much' must be a number above 0"),
        ({"adv_clip_max": "0"}, "adv_clip_max='0'"),
        ({"adv_clip_max": "1e300"}, "adv_clip_max='1e300'"),
        ({"adv_clip_max": "[5.0]"}, "adv_clip_max='[5.0]'"),
    ],
)
def test_metadata_that_are_refused(metadata, message, tmp_path):
    path = write_step(tmp_path, metadata=metadata)
    for load in (dumps.load, dumps.load_loss):
        assert message in refusal(path, load)


def test_a_file_of_no_format_version_is_another_programs(tmp_path):
    message = refusal(write_step(tmp_path, metadata={"format_version": None}))
    assert "format_version=''" in message
    assert "'1'" in message


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"advantages": None}, "advantages is missing"),
        ({"old_log_probs": None}, "old_log_probs is missing"),
        ({"rollout_log_probs": None}, "rollout_log_probs is missing"),
        ({"rollout_log_probs": torch.zeros(0, 2)}, "rollout_log_probs has shape [0, 2]; it must be [B, T]"),
        ({"rollout_log_probs": torch.zeros(BATCH, 0)}, "rollout_log_probs has shape [8, 0]"),
        ({"rollout_log_probs": ROWS}, "rollout_log_probs has shape [8]"),
        ({"rollout_log_probs": torch.zeros(2, 1001)}, "T from 1 to 1000"),
        ({"old_log_probs": torch.zeros(BATCH, 3)}, "old_log_probs has shape [8, 3]; it must be [8, 2]"),
        ({"rewards": WINDOW}, "rewards has shape [8, 2]; it must be [8]"),
        (
            {"rollout_log_probs": WINDOW.bool()},
            "rollout_log_probs has dtype BOOL; it must be F64 or F32 or F16",
        ),
        ({"old_log_probs": WINDOW.to(torch.int8)}, "old_log_probs has dtype I8"),
        ({"advantages": ROWS.long()}, "advantages has dtype I64"),
        ({"sigmas": WINDOW.to(torch.complex64)}, "sigmas has dtype C64"),
        ({"step_indices": WINDOW}, "step_indices has dtype F32; it must be I64 or I32"),
        ({"group_ids": torch.full((BATCH,), torch.nan)}, "group_ids has dtype F32"),
        ({"step_indices": WINDOW.long() + 10**7}, "step_indices holds 1e+07; it must lie from 0 to 999"),
        ({"step_indices": WINDOW.long() + 10**18}, "step_indices holds 1e+18"),
        ({"step_indices": WINDOW.long() - 1}, "step_indices holds -1"),
        ({"sigmas": WINDOW + torch.nan}, "sigmas holds nan; it must lie from 0"),
        ({"sigmas": WINDOW - 1}, "sigmas holds -1"),
        ({"sigmas": WINDOW + 900}, "sigmas holds 900; it must lie from 0 to 1"),
        ({"stds": WINDOW}, "stds holds 0"),
        ({"stds": WINDOW + torch.inf}, "stds holds inf"),
        ({"advantages": ROWS + torch.nan}, "advantages holds nan; it must lie from -3.40282e+38 to"),
        ({"advantages": ROWS - torch.inf}, "advantages holds -inf"),
        ({"old_rollout_kl": WINDOW - 1e-3}, "old_rollout_kl holds -0.001; it must lie from 0 to inf"),
    ],
)
def test_tensors_that_are_refused(tensors, message, tmp_path):
    assert message in refusal(write_step(tmp_path, tensors=tensors))


def test_a_bypass_step_has_the_log_probs_of_the_rollout(tmp_path):
    path = write_step(tmp_path, metadata={"mode": "bypass"})
    told = refusal(path)
    assert "mode='bypass'" in told
    assert "old_log_probs" in told
    rollout = good_tensors()["rollout_log_probs"]
    rollout[0, 0] = torch.nan
    path = write_step(
        tmp_path,
        tensors={"rollout_log_probs": rollout, "old_log_probs": rollout.clone()},
        metadata={"mode": "bypass"},
    )
    assert dumps.load(path).bypass


def test_terms_that_are_not_finite_are_data(tmp_path):
    tensors = good_tensors()
    tensors["old_log_probs"][0] = torch.nan
    tensors["rollout_log_probs"][1] = -torch.inf
    tensors["rewards"][:] = torch.nan
    tensors["stds"] = torch.full((BATCH, 2), torch.nan)
    found = dumps.load(write_step(tmp_path, tensors=tensors))
    assert found.old_log_probs.isnan().sum() == 2


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_a_step_without_any_finite_log_prob_is_data(mode, tmp_path):
    broken = {"old_log_probs": WINDOW + torch.nan, "rollout_log_probs": WINDOW + torch.nan}
    found = dumps.load(write_step(tmp_path, tensors=broken, metadata={"mode": mode}))
    assert found.old_log_probs.isnan().all()


def test_numbers_of_few_bits_are_read_as_float32(tmp_path):
    halves = {name: value.half() for name, value in good_tensors().items() if value.is_floating_point()}
    path = write_step(tmp_path, tensors=halves | {"group_ids": good_tensors()["group_ids"].int()})
    found = dumps.load(path)
    assert (found.old_log_probs.dtype, found.group_ids.dtype) == (torch.float32, torch.int64)


def test_tensors_of_a_later_version_are_left_alone(tmp_path):
    assert dumps.load(write_step(tmp_path, tensors={"new": torch.zeros(3, dtype=torch.bool)})).tensors()


def test_sizes_that_a_header_claims_are_not_believed(tmp_path):
    """Two tensors in the place of one, and one of 2^60 elements in a file of a few bytes."""
    path = tmp_path / "step_000001.safetensors"
    for shape, offsets in (([2**30, 2**30], [0, 2**62]), ([2, 2], [0, 2**62]), ([2, 2], [-16, 0])):
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        header = json.dumps({"rollout_log_probs": tensor}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        assert "is damaged" in refusal(path)
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "is damaged" in refusal(path)


def test_a_file_of_holes_is_not_read(tmp_path):
    """Terabytes of zeros that the disk does not have."""
    path = tmp_path / "step_000001.safetensors"
    assert f"{checks.MAX_BYTES} bytes" in refusal(holes(path, 2**36))


def holes(path, samples):
    """A sparse file of so many samples."""
    window, rows = [samples, 2], [samples]
    end, entries = 0, {}
    for name, shape in (("rollout_log_probs", window), ("old_log_probs", window), ("advantages", rows)):
        size = 4 * samples * len(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    said = {"format_version": "1", "step": "1", "mode": "bypass", "loss_mode": "flow_grpo"}
    header = json.dumps({"__metadata__": said} | entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + end)
    return path


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing", "circle of links", "device"])
def test_a_name_without_a_file(kind, tmp_path):
    path = tmp_path / "step_000001.safetensors"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to(tmp_path / "nowhere")
        case "circle of links":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
    assert f"{path} is damaged: it is a folder" in refusal(path)


def test_a_path_that_is_not_utf8_is_not_called_damaged(tmp_path):
    folder = tmp_path / os.fsdecode(b"steps\xff")
    with pytest.raises(ConfigError, match=r"step_000001\.safetensors .*UTF-8;"):
        dumps.load(write_step(tmp_path).rename((folder.mkdir() or folder) / "step_000001.safetensors"))


def test_a_file_that_is_cut_is_damaged(tmp_path):
    path = write_step(tmp_path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "is damaged" in refusal(path)


def test_two_files_of_a_step_are_named(tmp_path):
    write_step(tmp_path, 1)
    write_step(tmp_path, 1, name="step_01.safetensors")
    with pytest.raises(ConfigError, match=r"step_000001\.safetensors .*step_01\.safetensors .* step 1;"):
        dumps.files(tmp_path)


def test_names_that_are_no_step(tmp_path):
    write_step(tmp_path)
    for name in ("step_one", "step_-1", "step_٣", f"step_{'9' * 200}", "step_000002.safetensors.bak"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    assert list(dumps.files(tmp_path)) == [1]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"step_indices": [0.5, 1.0]}, "step_indices holds 0.5; .* whole numbers"),
        ({"step_indices": [0.0, float("nan")]}, "step_indices holds nan; .* whole numbers"),
        ({"step_indices": [0, 1000]}, "step_indices holds 1000; .* 0 to 999"),
        ({"sigmas": [0.9, -0.1]}, "sigmas holds -0.1; .* 0 to 1.001"),
        ({"num_elements": 0}, "num_elements='0' .* whole number"),
        ({"clip_ratio": []}, r"clip_ratio='\[\]' .* above 0"),
        ({"clip_ratio": "1e-4"}, r"clip_ratio='\"1e-4\"' .* above 0"),
        ({"num_elements": True}, "num_elements='true' .* whole number"),
        (
            {"policy_versions": [3, 4] * (BATCH // 2), "version": np.int64(3)},
            "policy_versions holds 4, .*version=3: ",
        ),
        ({"step_indices": [5, 2], "sigmas": [0.9, 0.1]}, "sigmas holds 0.1 at step 2 and 0.9 at step 5;"),
        (
            {"step_indices": [1, 3], "clip_ratio": [1e-4, 2e-4]},
            "clip_ratio holds 2 .*step_indices reaches 3;",
        ),
        ({"clip_ratio": [1e-4]}, "clip_ratio holds 1 .* 2 steps;"),
        (
            {"rollout_log_probs": torch.zeros(0, 2), "advantages": torch.zeros(0)},
            r"rollout_log_probs has shape \[0, 2\];",
        ),
    ],
)
def test_what_cannot_be_read_is_not_written(given, named, tmp_path):
    with pytest.raises(BatchError, match=named):
        flowcorr.dump(tmp_path, 1, **({"rollout_log_probs": WINDOW, "advantages": ROWS} | given))
    assert not dumps.files(tmp_path)


def test_every_tensor_has_its_rules():
    tensors = [entry.name for entry in fields(dumps.DumpedTerms) if "Tensor" in str(entry.type)]
    assert sorted(checks.COLUMNS) == sorted(tensors)
