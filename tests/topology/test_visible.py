"""Which GPU a rank drives, by the variables of CUDA and of HIP."""

from dataclasses import replace

import pytest

from gradwire.topology.assign import gpu_for_local_rank, nic_for_local_rank, nics_of_gpus
from gradwire.topology.graph import GivenPath, Gpu, Machine, Nic
from gradwire.topology.pci_ids import AMD_GPU
from gradwire.topology.presets import dgx_h100
from gradwire.topology.visible import visible_gpus, without_idle_gpus

CUDA = "CUDA_VISIBLE_DEVICES"
UUIDS = tuple(f"GPU-{index}932f937-d72c-4106-c12f-20bd9faed9f{index}" for index in range(8))
SLICES = ("MIG-41b36412-ae44-5021-baa2-86b1036cd2cf", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd")


def named(machine: Machine) -> Machine:
    gpus = zip(machine.gpus, UUIDS, strict=True)
    return replace(machine, gpus=tuple(replace(gpu, uuid=uuid) for gpu, uuid in gpus))


def amd(machine: Machine) -> Machine:
    """GPUs of AMD, whose driver does not count them in the order of the bus."""
    order = (3, 1, 2, 0, 7, 5, 6, 4)
    gpus = zip(machine.gpus, order, strict=True)
    return replace(
        machine,
        gpus=tuple(
            replace(gpu, vendor=AMD_GPU, index=index, uuid=f"GPU-{index}eadbeefdeadbeef") for gpu, index in gpus
        ),
    )


def keys(machine: Machine, variables: dict[str, str], ranks: int = 3) -> list[int | None]:
    """The position on the bus of the GPU of each local rank, which drives that GPU's card."""
    found: list[int | None] = []
    cards = nics_of_gpus(machine)
    for rank in range(ranks):
        gpu = gpu_for_local_rank(machine, rank, variables)
        assert nic_for_local_rank(machine, rank, variables) == (gpu and cards[gpu.key])
        found.append(None if gpu is None else machine.gpus.index(gpu))
    return found


@pytest.mark.parametrize(("text", "numbers"), [
    (None, [0, 1, 2]),
    ("4,5", [4, 5, 4]),
    ("7, 3", [7, 3, 7]),
    ("2,9,3", [2, 2, 2]),
    ("1gpu2,2ampere", [1, 2, 1]),
    ("3,3", [None] * 3),
    ("", [None] * 3),
    ("-1", [None] * 3),
    (f"{UUIDS[5]},{UUIDS[2]}", [5, 2, 5]),
    ("GPU-6932f9", [6, 6, 6]),
    (f"{UUIDS[4]},GPU-none,{UUIDS[2]}", [4, 4, 4]),
    (f"{UUIDS[4]},1", [4, 4, 4]),
    (f"{UUIDS[4]},{UUIDS[4]}", [None] * 3),
    ("GPU-", [None] * 3),
    (f"MIG-{UUIDS[3]}/1/2", [3, 3, 3]),
])  # fmt: skip
def test_a_rank_drives_a_gpu_that_cuda_shows_it(text: str | None, numbers: list[int | None]) -> None:
    assert keys(named(dgx_h100()), {} if text is None else {CUDA: text}) == numbers


@pytest.mark.parametrize(("text", "said"), [
    ("all", "`CUDA_VISIBLE_DEVICES` is all: all is none of the 8 GPUs here"),
    ("2,9,3", "9 is none of the 8 GPUs here, and CUDA shows none from it on"),
    (UUIDS[0][:7] + "x", "is the UUID of no GPU here"),
    ("1,1", "names 1 twice"),
    ("", ""),
    ("-1", ""),
    ("NoDevFiles", ""),
    ("3,4", ""),
])  # fmt: skip
def test_what_is_named_and_not_shown_is_said(text: str, said: str) -> None:
    why = visible_gpus(named(dgx_h100()), {CUDA: text}).why
    assert said in why and bool(said) == bool(why)


@pytest.mark.parametrize("text", [UUIDS[0], f"MIG-{UUIDS[0]}/1/2", SLICES[0]])
def test_without_uuids_the_card_is_unknown_and_the_reason_is_said(text: str) -> None:
    machine = dgx_h100()
    assert keys(machine, {CUDA: text}) == [None] * 3
    seen = visible_gpus(machine, {CUDA: text})
    assert seen.unknown and text[:20] in seen.why and "nvidia-ml-py" in seen.why


def test_where_all_gpus_share_a_card_it_is_that_one_whichever_the_gpu() -> None:
    machine = dgx_h100()
    one = replace(machine, nics=machine.nics[:1])
    assert nic_for_local_rank(one, 5, {CUDA: UUIDS[0]}) == machine.nics[0]
    assert nic_for_local_rank(one, 5, {CUDA: ""}) is None


def test_of_mig_slices_cuda_shows_one() -> None:
    machine = named(dgx_h100())
    gpus = (*machine.gpus[:2], replace(machine.gpus[2], slices=SLICES), *machine.gpus[3:])
    machine = replace(machine, gpus=gpus)
    assert keys(machine, {CUDA: ",".join(SLICES)}) == [2, 2, 2]
    assert keys(machine, {CUDA: SLICES[1]}) == keys(machine, {}) == [2, 2, 2]
    assert keys(machine, {CUDA: "0,1"}) == [0, 1, 0]
    assert "of no GPU here" in visible_gpus(machine, {CUDA: "MIG-0"}).why


def test_unlike_gpus_have_numbers_only_in_the_order_of_the_bus() -> None:
    machine = named(dgx_h100())
    mixed = replace(machine, gpus=(replace(machine.gpus[0], name="NVIDIA T400"), *machine.gpus[1:]))
    assert keys(mixed, {CUDA: "0,1"}) == keys(mixed, {}) == [None] * 3
    assert keys(mixed, {CUDA: "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [0, 1, 0]
    assert keys(mixed, {CUDA: UUIDS[1]}) == [1, 1, 1]
    assert "PCI_BUS_ID" in visible_gpus(mixed, {}).why


@pytest.mark.parametrize(("variables", "numbers"), [
    ({}, [3, 1, 2]),
    ({"HIP_VISIBLE_DEVICES": "4,5"}, [7, 5, 7]),
    ({CUDA: "4,5"}, [7, 5, 7]),
    ({"HIP_VISIBLE_DEVICES": "", CUDA: "5"}, [5, 5, 5]),
    ({"HIP_VISIBLE_DEVICES": "4", CUDA: "5"}, [7, 7, 7]),
    ({"ROCR_VISIBLE_DEVICES": "4,5,6"}, [7, 5, 6]),
    ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, [6, 7, 6]),
    ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4"}, [None] * 3),
    ({"ROCR_VISIBLE_DEVICES": ""}, [None] * 3),
    ({"ROCR_VISIBLE_DEVICES": "GPU-0EADBEEF,1"}, [3, 1, 3]),
    ({"ROCR_VISIBLE_DEVICES": "6,6,1"}, [6, 6, 6]),
    ({"HIP_VISIBLE_DEVICES": "GPU-7eadbeefdeadbeef"}, [4, 4, 4]),
])  # fmt: skip
def test_a_rank_drives_a_gpu_that_hip_shows_it(variables: dict[str, str], numbers: list[int | None]) -> None:
    assert keys(amd(dgx_h100()), variables) == numbers


def test_a_uuid_is_unknown_where_amds_driver_shows_none() -> None:
    machine = amd(dgx_h100())
    machine = replace(machine, gpus=tuple(replace(gpu, uuid=None) for gpu in machine.gpus))
    assert keys(machine, {"ROCR_VISIBLE_DEVICES": "GPU-0eadbeef"}) == [None] * 3
    assert "ROCR_VISIBLE_DEVICES" in visible_gpus(machine, {"ROCR_VISIBLE_DEVICES": "GPU-0eadbeef"}).why


def test_gpus_of_a_job_share_no_card_that_only_idle_gpus_would_drive() -> None:
    """Four GPUs equally far from two cards, of which a job uses two: each of the two has a card of its own."""
    machine = Machine(
        gpus=tuple(Gpu(key=f"g{index}", index=index) for index in range(4)),
        nics=(Nic(key="a"), Nic(key="b")),
        given_paths=tuple(GivenPath(a=f"g{index}", b=nic, name="NODE") for index in range(4) for nic in "ab"),
    )
    for numbers in ("0,2", "1,3", "0,1", "3,0"):
        drivers = [nic_for_local_rank(machine, rank, {CUDA: numbers}) for rank in range(2)]
        assert {nic.key for nic in drivers if nic} == {"a", "b"}, numbers
    # A process with one GPU is one of several with one each: all GPUs are dealt the cards.
    alone = [nic_for_local_rank(machine, 0, {CUDA: str(index)}) for index in range(4)]
    assert [nic.key for nic in alone if nic] == ["a", "b", "a", "b"]
    assert without_idle_gpus(machine, {CUDA: "2"}) == without_idle_gpus(machine, {}) == machine
