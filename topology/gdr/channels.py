"""The network channels of an NCCL log by rank and direction, for people and for machines."""

from gradwire.topology.gdr.inputs.nccl_log import NcclLog

DIRECTIONS = ("send", "receive")


def channel_counts(log: NcclLog) -> dict[int, tuple[tuple[int, int], ...]]:
    """Rank -> (channels with GDRDMA, all network channels), sending and receiving."""
    ranks = sorted({rank for counter in (log.gdr_channels, log.staged_channels) for rank, _ in counter})
    return {
        rank: tuple(
            (log.gdr_channels[rank, way], log.gdr_channels[rank, way] + log.staged_channels[rank, way])
            for way in DIRECTIONS
        )
        for rank in ranks
    }


def channel_rows(log: NcclLog) -> list[tuple[str, ...]]:
    """(ranks, sending, receiving), ranks with the same counts in one row: (`0-2, 5`, `8 of 8`, `0 of 8`)."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, counts in channel_counts(log).items():
        alike.setdefault(counts, []).append(rank)
    return [
        (_ranges(ranks), *(f"{good} of {total}" if total else "-" for good, total in counts))
        for counts, ranks in alike.items()
    ]


def channel_json(log: NcclLog) -> list[dict[str, int]]:
    """A row for each rank: `rank`, `send_gdr`, `send`, `receive_gdr`, `receive`."""
    return [
        {"rank": rank, "send_gdr": send[0], "send": send[1], "receive_gdr": receive[0], "receive": receive[1]}
        for rank, (send, receive) in channel_counts(log).items()
    ]


def _ranges(numbers: list[int]) -> str:
    """`0-2, 5` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
