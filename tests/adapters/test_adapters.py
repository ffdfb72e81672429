"""The adapters in the real frameworks: as plain DDP where exact, near it where compressed, resumed bit for bit.

`make adapters` installs the frameworks beside the test environment and runs these; where one is missing, its tests are
skipped.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from adapters.conftest import RunJob

pytestmark = pytest.mark.slow


def needs(package: str) -> pytest.MarkDecorator:
    """Without importing it here: the jobs do."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"`make adapters` installs {package}")


@needs("lightning")
def test_lightning(run_job: RunJob) -> None:
    for found in run_job("lightning_job"):
        assert found.pop("files") == [f"epoch=3.ckpt.gradwire_state_{rank}.pth" for rank in range(2)]
        assert found == {"exact": True, "compressed": True, "resumed": True, "linked": True, "steps": [8, 4]}


@needs("transformers")
@needs("accelerate")
def test_transformers(run_job: RunJob) -> None:
    files = ["gradwire_state_0.pth", "gradwire_state_1.pth"]
    for found in run_job("transformers_job"):
        assert found == {"exact": True, "compressed": True, "resumed": True, "steps": [6, 3], "files": files}


@needs("accelerate")
def test_accelerate(run_job: RunJob) -> None:
    for found in run_job("accelerate_job"):
        assert "`model` has a hook already, gradwire's own" in found.pop("twice")
        files = ["gradwire_state_0.pth", "gradwire_state_1.pth"]
        assert found == {"exact": True, "compressed": True, "resumed": True, "shuffled": True, "files": files}


@needs("ray")
@needs("pyarrow")
def test_ray(tmp_path: Path) -> None:
    """Two workers on the backend "gradwire"; one fails after two steps, and Ray starts both again."""
    job = Path(__file__).parent / "jobs" / "ray_job.py"
    done = subprocess.run(
        [sys.executable, str(job), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"exact": True, "compressed": True, "resumed": True, "first": 2, "backend": "gradwire"}


@needs("lightning")
def test_lightning_with_another_strategy_is_refused() -> None:
    import gradwire

    callback = gradwire.lightning.Callback()
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace())
    with pytest.raises(TypeError, match=r"`strategy` is SimpleNamespace.*wanted Trainer\(strategy=\"ddp\"\)"):
        callback.on_fit_start(trainer, None)


@needs("transformers")
def test_the_trainer_itself_is_wanted() -> None:
    import gradwire

    with pytest.raises(TypeError, match=r"`trainer` is a str; wanted the Trainer: trainer\.add_callback"):
        gradwire.transformers.Callback("int8")
