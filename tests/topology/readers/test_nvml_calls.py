"""NVIDIA's own binding over a library with the signatures of nvml.h, built here: no GPU, every structure real."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.topology.gdr.inputs.environment import child_environment

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the stand-in with")

SOURCE = Path(__file__).with_name("nvml_standin.c")
HEALTHY = {
    "GPUS": 2,
    "SM": 90,
    "LINKS": 18,
    "SWITCH": 1,
    "HIDDEN": 0,
    "NO_P2P": 0,
    "ASLEEP": 0,
    "LOST": 0,
    "MIG": 3,
    "INIT": 0,
}
SCRIPT = """
import dataclasses, json
from gradwire.topology.readers import nvml
from gradwire.topology.readers.nvml import gdr_facts
print(json.dumps({"topo": dataclasses.asdict(nvml.read()), "gdr": gdr_facts()}))
"""

Answers = dict[str, dict[str, object]]
Ask = Callable[..., Answers]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Returns both readers' answers with a driver shaped by constants."""

    def answers(**changed: int) -> Answers:
        flags = [f"-D{name}={value}" for name, value in (HEALTHY | changed).items()]
        library = tmp_path / "libnvidia-ml.so.1"
        subprocess.run([str(COMPILER), "-shared", "-fPIC", "-w", *flags, str(SOURCE), "-o", str(library)], check=True)
        environment = child_environment({"LD_LIBRARY_PATH": str(tmp_path)})
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, timeout=60, check=True
        )
        result = json.loads(done.stdout)
        assert isinstance(result, dict)
        return result

    return answers


def rows(answers: dict[str, object], name: str) -> list[dict[str, object]]:
    found = answers[name]
    assert isinstance(found, list)
    return found


def test_two_gpus_on_a_switch(ask: Ask) -> None:
    found = ask()
    gpus, links = rows(found["topo"], "gpus"), rows(found["topo"], "links")
    assert [gpu["bus"] for gpu in gpus] == ["0000:3b:00.0", "10000:4c:00.0"]
    facts = ("name", "compute_capability", "memory_nbytes", "index")
    assert [gpus[0][name] for name in facts] == ["NVIDIA H100 80GB HBM3", 90, 80 << 30, 0]
    link = {"gigatransfers_per_second": 32.0, "current_gigatransfers_per_second": None, "lanes": 16, "virtual": False}
    assert gpus[0]["pcie"] == link
    assert [(link["b"], link["count"]) for link in links] == [("0000:85:00.0", 18)] * 2
    assert (found["topo"]["reason"], found["topo"]["unresolved"], found["topo"]["silent"]) == (None, 0, 0)
    assert found["gdr"]["driver_version"] == "580.65.06"
    assert rows(found["gdr"], "gpus")[0] == {
        "bus_id": "0000:3b:00.0", "name": "NVIDIA H100 80GB HBM3", "bar1_nbytes": 128 << 30, "memory_nbytes": 80 << 30,
        "nvlinks": 18, "nvlinks_active": 18, "mig": False, "fabric_state": 3, "fabric_status": 0, "confidential": False,
    }  # fmt: skip


def test_direct_links_are_one_bundle(ask: Ask) -> None:
    links = rows(ask(SM=80, LINKS=4, SWITCH=0)["topo"], "links")
    assert [(link["count"], link["bytes_per_second"]) for link in links] == [(4, 80e9)]


def test_links_that_carry_no_peer_traffic_do_not_count(ask: Ask) -> None:
    assert [link["count"] for link in rows(ask(NO_P2P=2)["topo"], "links")] == [16, 16]


def test_links_that_sleep_count(ask: Ask) -> None:
    found = ask(ASLEEP=1)
    assert [link["count"] for link in rows(found["topo"], "links")] == [18, 18]
    assert rows(found["gdr"], "gpus")[0]["nvlinks_active"] == 18


def test_a_far_end_that_cannot_be_seen_is_a_switch(ask: Ask) -> None:
    assert rows(ask(HIDDEN=1)["topo"], "nvswitches") == [{"key": "hidden"}]


def test_a_gpu_off_the_bus_hides_only_itself(ask: Ask) -> None:
    found = ask(LOST=1)
    assert (len(rows(found["topo"], "gpus")), found["topo"]["silent"], len(rows(found["gdr"], "gpus"))) == (1, 1, 1)


def test_an_old_driver_answers_what_it_can(ask: Ask) -> None:
    found = ask(OLD=1, SWITCH=0, LINKS=12)
    assert [link["count"] for link in rows(found["topo"], "links")] == [12]
    gpu = rows(found["gdr"], "gpus")[0]
    assert gpu["nvlinks_active"] == 12 and "fabric_state" not in gpu and "confidential" not in gpu


def test_links_of_an_old_driver_to_something_unknown_stay_unresolved(ask: Ask) -> None:
    found = ask(OLD=1, SWITCH=1)["topo"]
    assert (found["unresolved"], rows(found, "links"), rows(found, "nvswitches")) == (36, [], [])


def test_mig(ask: Ask) -> None:
    assert [rows(ask(MIG=code)["gdr"], "gpus")[0].get("mig") for code in (0, 3, 15)] == [True, False, None]


def test_uuids_of_gpus_and_of_their_slices(ask: Ask) -> None:
    whole, sliced = rows(ask()["topo"], "gpus"), rows(ask(MIG=0)["topo"], "gpus")
    gpus = [f"GPU-8932f937-d72c-4106-c12f-20bd9faed9f{number}" for number in range(2)]
    assert [(gpu["uuid"], gpu["slices"]) for gpu in whole] == [(uuid, []) for uuid in gpus]
    slices = [[f"MIG-41b36412-ae44-5021-baa2-86b1036cd2{number:02}" for number in pair] for pair in ((0, 2), (7, 9))]
    assert [(gpu["uuid"], gpu["slices"]) for gpu in sliced] == list(zip(gpus, slices, strict=True))


def test_a_driver_and_a_library_of_two_versions(ask: Ask) -> None:
    found = ask(INIT=18)
    assert "mismatch" in str(found["topo"]["reason"]) and "mismatch" in str(found["gdr"]["nvml_error"])
