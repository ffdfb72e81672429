from gradwire.topology.graph import Gpu, Machine, Nic, Port
from gradwire.topology.show import draw


def test_the_matrix_counts_gpus_and_cards_as_nvidia_smi_does() -> None:
    gpus = tuple(Gpu(key=f"g{index}", index=index) for index in (10, 2, 0))
    nics = tuple(Nic(key=name, ports=(Port(name=name),)) for name in ("mlx5_10", "mlx5_2", "mlx5_0"))
    rows = draw.matrix(Machine(gpus=gpus, nics=nics)).splitlines()
    assert rows[0].split("\t")[1:7] == ["GPU0", "GPU2", "GPU10", "NIC0", "NIC1", "NIC2"]
    assert [row.split()[1] for row in rows if row.startswith("  NIC")] == ["mlx5_0", "mlx5_2", "mlx5_10"]
