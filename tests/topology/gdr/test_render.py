"""Counting channels: ranks that are alike share a row, and one log of many is the sum of all."""

from hypothesis import given
from hypothesis import strategies as st

from gradwire.topology.gdr.inputs.nccl_log import NcclLog, merged_logs, parse_nccl_log
from gradwire.topology.gdr.render import channel_counts, channel_json, channel_rows

channels = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["send", "receive"]), st.sampled_from(["", "/GDRDMA"])), max_size=40
)


def lines(found: list[tuple[int, str, str]]) -> list[str]:
    ends = {"send": "{0}[0] -> 9[0]", "receive": "9[0] -> {0}[0]"}
    return [
        f"n:1:2 [0] NCCL INFO Channel 00/0 : {ends[way].format(rank)} [{way}] via NET/IB/0{gdr}"
        for rank, way, gdr in found
    ]


def counts_of(log: NcclLog | None) -> object:
    return None if log is None else (log.gdr_channels, log.staged_channels, log.lines)


@given(channels, st.integers(0, 40))
def test_parts_of_a_log_sum_up_to_the_whole(found: list[tuple[int, str, str]], cut: int) -> None:
    whole = parse_nccl_log(lines(found))
    parts = [parse_nccl_log(lines(found[:cut])), parse_nccl_log(lines(found[cut:]))]
    assert counts_of(merged_logs(parts)) == counts_of(whole)


@given(channels)
def test_no_channel_is_lost_on_the_way_to_a_row(found: list[tuple[int, str, str]]) -> None:
    log = parse_nccl_log(lines(found))
    counts = channel_counts(log)
    assert sum(total for row in counts.values() for _, total in row) == log.network_channels == len(found)
    assert sum(row["send_gdr"] + row["receive_gdr"] for row in channel_json(log)) == log.gdr_channels.total()
    assert len(channel_rows(log)) == len(set(counts.values()))


def test_ranks_that_are_alike_share_a_row() -> None:
    good = [(rank, way, "/GDRDMA") for rank in (0, 1, 2, 4) for way in ("send", "receive")]
    log = parse_nccl_log(lines([*good, (3, "send", "/GDRDMA"), (3, "send", "")]))
    assert channel_rows(log) == [("0-2, 4", "1 of 1", "1 of 1"), ("3", "1 of 2", "-")]


def test_a_whole_says_what_its_parts_say() -> None:
    assert merged_logs([]) is None
    one = parse_nccl_log(
        [
            "NCCL INFO NCCL version 2.27.3+cuda12.9",
            "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0",
            "NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
            "NCCL INFO GPU/0-3000 :NET/0 (3/24.0/PHB)",
        ]
    )
    two = parse_nccl_log(
        [
            "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE; OOB eth0",
            "NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
            "NCCL INFO GPU/0-3000 :NET/0 (2/24.0/PXB)",
            "NCCL INFO Using network Socket",
        ]
    )
    for order in ([one, two], [two, one]):
        whole = merged_logs(order)
        assert whole is not None and whole.version == (2, 27, 3) and whole.networks == {"Socket"}
        assert whole.hcas == {"mlx5_0": False} and whole.relaxed_ordering is False and whole.nearest == "PXB"
