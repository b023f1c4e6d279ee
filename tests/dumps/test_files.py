"""Files of a dump: whole or not there."""

import pytest
import torch

from flowcorr.dumps.files import opened, write
from flowcorr.errors import BackendError, ConfigError


def test_a_file_is_written_as_a_whole(tmp_path):
    path = write(tmp_path / "a" / "x.safetensors", {"values": torch.arange(3)}, {"step": "1"}, "give up")
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]
    with opened(path) as (file, metadata):
        assert file.get_tensor("values").tolist() == [0, 1, 2]
        assert metadata == {"format_version": "1", "step": "1"}


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(BackendError, match=r"x\.safetensors .*\[Errno 17\].* give up$"):
        write(tmp_path / "taken" / "x.safetensors", {"values": torch.arange(3)}, {}, "give up")


def test_a_file_of_another_program(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match=f"^{path} is damaged: "), opened(path):
        pass
