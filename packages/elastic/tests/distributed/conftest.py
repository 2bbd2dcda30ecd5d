"""The run that nothing happens to; the scripts here are programs that tests start, not modules with examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.launchers import LocalJob

collect_ignore = ["training_script.py", "sharded_script.py", "torchrun_script.py"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Return the job of one worker that trained in peace."""
    folder = tmp_path_factory.mktemp("reference")
    script = str(Path(__file__).parent / "training_script.py")
    with LocalJob([script, str(folder), "--step-seconds", "0"], folder) as job:
        job.scale_out(1)
        assert job.wait(90) == {"w0": 0}
    return job
