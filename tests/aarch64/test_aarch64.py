"""Law: the wheel for 64-bit Arm builds, installs and starts there; its kernels give the same bits as on x86-64, codecs
and shared memory alike, and ranks of both train one model.

`make aarch64` runs it: the project's own build makes the wheel with a cross compiler, and qemu's user-mode emulation
runs an Arm Python whose pip installs it (build.sh), with torch's own build for Arm where there is one (arm_torch.py).
An emulated processor rounds as a real one does; how fast the code is there, it does not tell.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aarch64.arm_torch import NoArmTorchError, prepare
from gradwire import _native

FOLDER = Path(__file__).parent
BUILT = FOLDER.parents[1] / "build" / "aarch64" / os.environ.get("ARM_DEBIAN", "")
"""The Arm Python stays there for the next run; the wheel is built anew."""
PYTHON = BUILT / "env" / "bin" / "python"

pytestmark = [pytest.mark.aarch64, pytest.mark.slow]


@pytest.fixture(scope="module")
def arm_packages() -> Path:
    """Where the Arm Python has its packages, with the wheel that was just built."""
    subprocess.run([FOLDER / "build.sh", BUILT, sys.executable], check=True)
    [packages] = (BUILT / "env" / "lib").glob("python*/site-packages")
    return packages


def test_pip_takes_the_wheel_on_arm_and_its_commands_start(arm_packages: Path) -> None:
    [wheel] = (BUILT / "dist").glob("*.whl")
    [module] = (arm_packages / "gradwire").glob("_native*.so")
    tag = arm_packages.parent.name.replace("python", "cp").replace(".", "")
    if "abi3" in wheel.name:
        assert wheel.name.endswith("-cp312-abi3-linux_aarch64.whl") and module.name == "_native.abi3.so"
    else:
        assert wheel.name.endswith(f"-{tag}-{tag}-linux_aarch64.whl") and module.name.endswith("-aarch64-linux-gnu.so")

    def said(*words: str) -> str:
        command = [str(PYTHON.with_name("gradwire")), *words]
        return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout

    assert said("--version").split() == ["gradwire", wheel.name.split("-")[1]]
    assert "from sysfs" in said("topo")
    assert "PASS" in said("gdr-check", "--example").upper()


def results(command: list[str], module: Path, isa: str) -> dict[str, str]:
    """Runs vectors.py in an interpreter, with a module held to an instruction set."""
    run = [*command, str(FOLDER / "vectors.py"), str(module), isa]
    found: dict[str, str] = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout)
    return found


def test_neon_gives_the_bits_of_this_machine(arm_packages: Path) -> None:
    here = results([sys.executable], Path(_native.__file__), _native.isa())
    [module] = (arm_packages / "gradwire").glob("_native*.so")
    arm = results([str(PYTHON)], module, "neon")
    differ = [case for case in here if here[case] != arm[case]]
    assert here.keys() == arm.keys() and len(here) > 400
    assert not differ, differ


def test_the_results_are_those_that_wheels_are_tried_with(tmp_path: Path) -> None:
    """What cibuildwheel runs on each processor; and it can fail."""
    run = [sys.executable, str(FOLDER / "vectors.py"), _native.__file__, "best"]
    done = subprocess.run([*run, str(FOLDER / "digests.json")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    other = json.loads((FOLDER / "digests.json").read_text())
    other[next(iter(other))] = "another"
    (tmp_path / "other.json").write_text(json.dumps(other))
    done = subprocess.run([*run, str(tmp_path / "other.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"1 differ: {next(iter(other))}" in done.stdout


def test_the_plain_loops_give_the_same_bits_here() -> None:
    """A machine whose instruction set nothing was written for, in a job with this one."""
    best = results([sys.executable], Path(_native.__file__), _native.isa())
    plain = results([sys.executable], Path(_native.__file__), "plain")
    assert [case for case in plain if plain[case] != best[case]] == []


def train(interpreters: Sequence[str | Path], *words: str) -> list[dict[str, Any]]:
    """Runs training.py in a process for each rank, and returns what each has said; one that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(len(interpreters)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [interpreter, str(FOLDER / "training.py"), *words],
            env={**os.environ, **job, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank, interpreter in enumerate(interpreters)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.2)
        assert [rank.poll() for rank in ranks] == [0] * len(ranks)
        return [json.loads(rank.communicate()[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.usefixtures("arm_packages")
def test_ranks_of_both_processors_train_one_model() -> None:
    """Over gloo between two nodes, and through shared memory on one: replicas stay alike, whatever their processors;
    and gradients that are the same on both lead to the weights that two ranks of this machine have."""
    try:
        prepare(BUILT)
    except NoArmTorchError as error:
        pytest.skip(str(error))
    here, words = sys.executable, ("int8", "ab", "aa")
    mixed = train([here, PYTHON], *words)
    assert [each["isa"] for each in mixed] == [_native.isa(), "neon"]
    assert mixed[0]["weights"] == mixed[1]["weights"]
    alike = train([here, here], *words)
    for case, weights in alike[0]["weights"].items():
        assert not case.startswith("elementwise") or mixed[0]["weights"][case] == weights, case
