import json
from collections.abc import Callable

import pytest

from gradwire.topology.errors import TopologyError
from gradwire.topology.graph import Machine
from gradwire.topology.presets import dgx_h100, pcie_box
from gradwire.topology.show import json_form

Graph = dict[str, list[dict[str, object]]]


def test_a_machine_comes_back_unchanged(preset: Machine) -> None:
    assert json_form.read(json_form.write(preset)) == preset


def test_the_summary_says_what_people_look_for() -> None:
    document = json.loads(json_form.write(dgx_h100()))
    gpu = document["gpus"][3]
    assert (document["n_gpu"], document["n_nic"], document["nvswitch"]) == (8, 10, True)
    assert (gpu["nearest_path"], gpu["nearest"], gpu["nic"]) == ("PIX", [["mlx5_3"]], ["mlx5_3"])
    assert gpu["within_default_level"] is True
    assert gpu["nvlinks"] == 18
    assert document["gpu_gpu"] == ["NV18"]
    assert json.loads(json_form.write(pcie_box()))["gpu_gpu"] == ["PHB", "SYS"]


def changed(change: Callable[[Graph], None]) -> str:
    document = json.loads(json_form.write(pcie_box()))
    change(document["graph"])
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph["gpus"].append(graph["gpus"][0]), "two things with the key"),
        (lambda graph: graph.update(gpus={}), r"`graph.gpus` is \{\}, expected a list"),
        (lambda graph: graph["gpus"][1].update(index="1"), r"`graph.gpus\[1\].index` is '1', expected int"),
        (lambda graph: graph["gpus"][1].update(index=-1), "expected a number from 0"),
        (lambda graph: graph["gpus"][1].update(index=True), "is True, expected int"),
        (lambda graph: graph["gpus"][1].update(index=1.5), "expected a number"),
        (lambda graph: graph["gpus"][1].update(colour="red"), "unknown field `colour`"),
        (lambda graph: graph["gpus"][1].pop("key"), "missing 1 required"),
        (lambda graph: graph["gpus"][1].update(bus="x"), "bus id 'x'"),
        (
            lambda graph: graph["gpus"].append({"key": "g", "pcie": {"gigatransfers_per_second": float("nan")}}),
            "is nan",
        ),
        (lambda graph: graph.update(links=[{"a": "x", "b": "numa0", "kind": "c2c"}]), "names 'x'"),
        (lambda graph: graph.update(links=[{"a": "numa1", "b": "numa0", "kind": "rope"}]), "expected one of nvlink"),
        (lambda graph: graph.update(switches=[{"key": "0000:01:00.0", "parent": "0000:01:00.0"}]), "below itself"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: Callable[[Graph], None], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        json_form.read(changed(change))
