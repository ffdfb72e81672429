from dataclasses import replace

import pytest

from gradwire.topology.assign import gpu_for_local_rank, nic_for_local_rank, nics_of_gpus
from gradwire.topology.fabric import fabric_of
from gradwire.topology.graph import DeviceLink, GivenPath, Gpu, Machine, Nic, Port
from gradwire.topology.levels import HOST_BYTES_PER_SECOND, levels_of
from gradwire.topology.paths import Distances, PathType
from gradwire.topology.presets import (
    PRESETS,
    cpu_only,
    dgx_a100,
    dgx_h100,
    pcie_box,
    preset_with,
    rtx_5090,
    rtx_pro_6000,
)
from gradwire.topology.readers.smi import read as read_smi


@pytest.mark.parametrize(
    ("machine", "intra", "inter"),
    [
        (dgx_a100(), 240e9, 8 * 24e9),
        (dgx_h100(), 370.8e9, 8 * 48e9),
        (pcie_box(), 10e9, 12.5e9),
        (pcie_box(1), 24e9, 12.5e9),
        (cpu_only(), None, 3.125e9),
    ],
    ids=["dgx_a100", "dgx_h100", "pcie_box", "one_gpu", "cpu_only"],
)
def test_bytes_per_second_of_known_machines(machine: Machine, intra: float | None, inter: float) -> None:
    inside, between = levels_of(machine)
    assert (inside.name, between.name) == ("intra_node", "inter_node")
    assert inside.bytes_per_second == (None if intra is None else pytest.approx(intra))
    assert between.bytes_per_second == pytest.approx(inter)


def test_latency_grows_with_the_distance(preset: Machine) -> None:
    inside, between = levels_of(preset)
    assert 0 < inside.alpha_seconds < between.alpha_seconds
    assert inside.source
    assert between.source


def test_nvlink_that_does_not_join_all_gpus_is_not_the_bottleneck() -> None:
    box = pcie_box()
    pair = DeviceLink(a=box.gpus[0].key, b=box.gpus[1].key, kind="nvlink", count=4, bytes_per_second=48e9)
    assert levels_of(replace(box, links=(pair,)))[0].bytes_per_second == 10e9


def test_a_source_that_cannot_show_nvlink_does_not_promise_pcie() -> None:
    (inside, _) = levels_of(replace(pcie_box(), links_known=False))
    assert inside.bytes_per_second is None
    assert "cannot show NVLink" in inside.source


def test_a_virtual_rate_is_unknown() -> None:
    machine = cpu_only()
    port = replace(machine.nics[0].ports[0], virtual=True)
    (_, between) = levels_of(replace(machine, nics=(replace(machine.nics[0], ports=(port,)),)))
    assert between.bytes_per_second is None
    assert "no NIC reports" in between.source


def test_the_rate_of_host_memory_is_the_callers_or_unknown() -> None:
    assert levels_of(cpu_only())[0].bytes_per_second is None
    assert levels_of(cpu_only(), host_memory_bytes_per_second=5e9)[0].bytes_per_second == 5e9


def test_a_matrix_has_links_of_unknown_speed() -> None:
    text = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"
    assert levels_of(read_smi(text))[0].bytes_per_second is None


def test_slices_of_gpus_have_none_of_their_links() -> None:
    machine = dgx_h100()
    sliced = replace(machine, gpus=(replace(machine.gpus[0], slices=("MIG-0", "MIG-1")), *machine.gpus[1:]))
    intra, inter = levels_of(sliced)
    assert intra.bytes_per_second is None and "MIG slices reach each other through host memory" in intra.source
    assert inter == levels_of(machine)[1]
    assert fabric_of(sliced) is None and fabric_of(machine) is not None


def test_every_gpu_drives_one_of_its_nearest_cards_and_they_take_turns(preset: Machine) -> None:
    chosen, distances = nics_of_gpus(preset), Distances(preset)
    for gpu in preset.gpus:
        assert chosen[gpu.key] in distances.nearest_nics(gpu)[1]
    if preset.hostname in ("dgx_a100", "dgx_h100"):
        assert len({nic.key for nic in chosen.values() if nic}) == 8


def test_the_number_of_a_gpu_is_the_drivers() -> None:
    machine = dgx_a100()
    reordered = replace(machine, gpus=machine.gpus[::-1])
    for index in range(8):
        gpu = next(gpu for gpu in machine.gpus if gpu.index == index)
        assert gpu_for_local_rank(reordered, index) == gpu
        chosen = nic_for_local_rank(reordered, index)
        assert chosen is not None
        assert Distances(machine).gpu_nic(gpu, chosen) is PathType.PXB


def in_a_container(*numbers: int) -> Machine:
    """A DGX whose bus shows every GPU to a container that was given some."""
    machine = dgx_h100()
    order = {given: index for index, given in enumerate(numbers)}
    strip = {"index": None, "name": None, "compute_capability": None}
    gpus = [
        replace(gpu, index=order[number]) if number in order else replace(gpu, **strip)  # type: ignore[arg-type]
        for number, gpu in enumerate(machine.gpus)
    ]
    own = {gpu.key for gpu in gpus if gpu.index is not None}
    return replace(machine, gpus=tuple(gpus), links=tuple(link for link in machine.links if link.a in own))


def test_gpus_that_the_driver_does_not_count_are_others() -> None:
    whole, part = dgx_h100(), in_a_container(6, 7)
    assert levels_of(part)[0] == levels_of(whole)[0]
    assert fabric_of(part) == fabric_of(whole)
    drivers = [gpu_for_local_rank(part, rank) for rank in range(3)]
    assert [gpu.key for gpu in drivers if gpu] == [whole.gpus[number].key for number in (6, 7, 6)]


def test_what_joins_the_one_gpu_that_a_rank_sees_is_unknown() -> None:
    alone = in_a_container(5)
    assert levels_of(alone)[0].bytes_per_second is None and fabric_of(alone) is None
    assert [gpu_for_local_rank(alone, rank) for rank in (0, 5)] == [alone.gpus[5]] * 2


def test_a_card_that_is_down_or_slow_is_not_chosen() -> None:
    machine = dgx_a100()
    _, near = Distances(machine).nearest_nics(machine.gpus[0])
    down = {near[0].key: replace(near[0], ports=(replace(near[0].ports[0], active=False),))}
    slow = {near[0].key: replace(near[0], ports=(replace(near[0].ports[0], bits_per_second=1e9),))}
    for changed in (down, slow):
        other = replace(machine, nics=tuple(changed.get(nic.key, nic) for nic in machine.nics))
        assert nics_of_gpus(other)[machine.gpus[0].key] == near[1]


def test_local_ranks_without_gpus_take_turns_on_the_fastest_cards() -> None:
    machine = cpu_only()
    fast = machine.nics[0]
    twin = replace(fast, key="0000:02:00.0", bus="0000:02:00.0")
    slow = replace(fast, key="0000:03:00.0", ports=(Port(name="eth9", bits_per_second=1e9),))
    three = replace(machine, nics=(fast, twin, slow))
    found = [nic_for_local_rank(three, rank) for rank in range(4)]
    assert [nic.key for nic in found if nic] == [fast.key, twin.key, fast.key, twin.key]
    assert nic_for_local_rank(replace(machine, nics=()), 0) is None
    assert nic_for_local_rank(dgx_h100(), 9) == dgx_h100().nics[1]


def test_a_card_without_a_port_is_not_driven_beside_one_that_has_one() -> None:
    bare, card = Nic(key="0000:00:03.0"), Nic(key="eth0", ports=(Port(name="eth0", interfaces=("eth0",)),))
    assert [nic_for_local_rank(Machine(nics=(bare, card)), rank) for rank in (0, 1)] == [card, card]
    assert nic_for_local_rank(Machine(nics=(bare,)), 0) is bare


def test_a_gpu_whose_near_cards_are_all_down_drives_one_that_is_up() -> None:
    machine = dgx_a100()
    _, near = Distances(machine).nearest_nics(machine.gpus[0])
    down = {nic.key: replace(nic, ports=tuple(replace(port, active=False) for port in nic.ports)) for nic in near}
    other = replace(machine, nics=tuple(down.get(nic.key, nic) for nic in machine.nics))
    chosen = nics_of_gpus(other)[machine.gpus[0].key]
    assert chosen is not None and chosen.key not in down


DEALT: dict[str, tuple[dict[str, str], dict[str, str | None]]] = {
    "one choice first": ({"a": "1 2", "b": "1"}, {"a": "2", "b": "1"}),
    "idle cards before shared ones": (
        {"0": "1", "1": "1 2 3 4", "2": "2", "3": "1 2 3 4"}, {"0": "1", "1": "3", "2": "2", "3": "4"},
    ),
    "a card is handed on": ({"a": "1 2", "b": "1 3", "c": "1 3"}, {"a": "2", "b": "3", "c": "1"}),
    "turns where all are alike": (
        {"a": "1 2", "b": "1 2", "c": "1 2", "d": "1 2"}, {"a": "1", "b": "2", "c": "1", "d": "2"},
    ),
    "two share the only card": ({"a": "1", "b": "1"}, {"a": "1", "b": "1"}),
    "one without a card": ({"a": "", "b": "1"}, {"a": None, "b": "1"}),
}  # fmt: skip
"""Case -> the cards that are as near to each GPU, and the card that each should drive."""


@pytest.mark.parametrize("case", DEALT)
def test_no_gpu_shares_a_card_while_one_as_near_is_idle(case: str) -> None:
    near, wanted = DEALT[case]
    cards = sorted({card for cards in near.values() for card in cards.split()})
    paths = [GivenPath(a=gpu, b=card, name="PIX") for gpu, own in near.items() for card in own.split()]
    machine = Machine(
        gpus=tuple(Gpu(key=gpu) for gpu in near), nics=tuple(Nic(key=card) for card in cards), given_paths=tuple(paths)
    )
    chosen = {gpu: nic and nic.key for gpu, nic in nics_of_gpus(machine).items()}
    users = {card: [gpu for gpu, own in chosen.items() if own == card] for card in cards}
    most = max(len(gpus) for gpus in {card: [g for g, own in wanted.items() if own == card] for card in cards}.values())
    assert max(map(len, users.values())) == most, chosen
    assert all(card is None or card in near[gpu].split() for gpu, card in chosen.items())
    assert chosen == wanted


def test_gpus_without_peers_exchange_through_host_memory() -> None:
    """The consumer and workstation presets have none: their PCIe 5.0 alone would be four times as fast."""
    for preset in (rtx_pro_6000, rtx_5090):
        machine = preset()
        inside, _ = levels_of(machine)
        assert inside.bytes_per_second == HOST_BYTES_PER_SECOND and "without peers" in inside.source
        able = replace(machine, gpus=tuple(replace(gpu, peers=None) for gpu in machine.gpus))
        assert (levels_of(able)[0].bytes_per_second or 0.0) > HOST_BYTES_PER_SECOND


NAMES = {
    "NVIDIA A100-SXM4-80GB": "dgx_a100", "NVIDIA A100-PCIE-40GB": "pcie_box", "NVIDIA A100 80GB PCIe": "pcie_box",
    "NVIDIA H100 80GB HBM3": "dgx_h100", "NVIDIA H100 PCIe": "pcie_box", "NVIDIA H100 NVL": "pcie_box",
    "NVIDIA H200": "dgx_h200", "NVIDIA H200 NVL": "pcie_box", "NVIDIA H800": "dgx_h100",
    "NVIDIA GH200 480GB": "gh200", "NVIDIA GH200 144G HBM3e": "gh200", "NVIDIA B200": "dgx_b200",
    "NVIDIA B300 SXM6 AC": "dgx_b200",
    "NVIDIA GB200": "gb200_nvl72", "NVIDIA GB300": "gb200_nvl72", "NVIDIA GB10": "dgx_spark",
    "NVIDIA GeForce RTX 5090": "rtx_5090", "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx_pro_6000",
    "AMD Instinct MI300X": "mi300x", "AMD Instinct MI325X OAM": "mi325x", "AMD Instinct MI350X": "mi350x",
    "AMD Instinct MI355X": "mi355x", "NVIDIA A10": "pcie_box",
}  # fmt: skip
"""Name that a driver reports -> preset that the doctor's command names."""


@pytest.mark.parametrize("name", NAMES)
def test_a_driver_s_name_leads_to_a_machine_with_its_links(name: str) -> None:
    assert preset_with(name) == NAMES[name]
    machine = PRESETS[NAMES[name]]()
    inside, between = levels_of(machine)
    assert (inside.bytes_per_second is not None or len(machine.gpus) == 1) and between.bytes_per_second is not None


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA L40S", "NVIDIA Strange A1000", ""])
def test_a_gpu_of_no_preset_is_none(name: str) -> None:
    assert preset_with(name) is None


def test_presets_of_blackwell_and_of_cdna4_have_their_own_links() -> None:
    b200, h100, mi355x = (levels_of(PRESETS[name]()) for name in ("dgx_b200", "dgx_h100", "mi355x"))
    assert b200[0].bytes_per_second == pytest.approx(18 * 40.1e9)
    assert h100[0].bytes_per_second == pytest.approx(18 * 20.6e9)
    assert b200[1].bytes_per_second == h100[1].bytes_per_second
    assert mi355x == levels_of(PRESETS["mi300x"]())  # RCCL has one figure for the links of gfx94x and gfx950
    fabric = fabric_of(PRESETS["dgx_b200"]())
    assert fabric is not None and fabric.nvls and fabric.compute_capability == 100


def test_a_node_of_gh200_has_the_links_of_an_h100_and_no_switch_that_sums() -> None:
    """18 NVLinks a GPU, six to each of the others: the rate of a DGX H100, half its GPUs, and no NVSwitch."""
    node, dgx = PRESETS["gh200"](), dgx_h100()
    (inside, between), (dgx_inside, _) = levels_of(node), levels_of(dgx)
    assert inside.bytes_per_second == pytest.approx(dgx_inside.bytes_per_second)
    assert between.bytes_per_second == pytest.approx(4 * 25e9)
    fabric, dgx_fabric = fabric_of(node), fabric_of(dgx)
    assert fabric is not None and dgx_fabric is not None
    assert (fabric.nvls, dgx_fabric.nvls) == (False, True)
    assert nics_of_gpus(node) == {gpu.key: nic for gpu, nic in zip(node.gpus, node.nics, strict=True)}
    assert {cpu.architecture for cpu in node.cpus} == {"arm64"} and len(node.cpus) == 4


def test_mi350x_is_called_by_its_name() -> None:
    machine = PRESETS["mi350x"]()
    assert {gpu.name for gpu in machine.gpus} == {"AMD Instinct MI350X"}
    assert {gpu.architecture for gpu in machine.gpus} == {"gfx950"}
    assert levels_of(machine) == levels_of(PRESETS["mi355x"]())


def test_links_of_a_generation_without_a_figure_are_said_to_be_unknown() -> None:
    """Rubin: NVLink joins the GPUs, and NCCL 2.30 has no rate for its links."""
    inside, _ = levels_of(dgx_h100("NVIDIA Rubin", 107))
    assert inside.bytes_per_second is None
    assert inside.source.startswith("unknown: NVLink") and "no figure" in inside.source
