import json

import pytest
from instruments.run_folders import write_run


@pytest.fixture
def runs(tmp_path, evil):
    """Two seeds of one configuration, and another configuration with hostile text."""
    return [
        write_run(tmp_path / "a", images=7),
        write_run(tmp_path / "b", "trainer.seed=1", scale=1.5),
        write_run(
            tmp_path / "c <script>",
            f"sampling.negative_prompt={json.dumps(evil)}",
            "sampling.guidance_scale=2.0",
            scale=0.0,
        ),
    ]
