"""Small outputs of other tools: `nvidia-smi nvlink --status` and `ib_write_bw`."""

import re


def parse_nvlink_status(text: str) -> dict[int, int]:
    """Parses `nvidia-smi nvlink --status`: GPU index -> number of active NVLinks; empty if no GPU is in the text.

    Source: nvidia-smi(1), nvlink --status: one `Link N: X GB/s` line per active link, `<inactive>` otherwise.
    """
    active: dict[int, int] = {}
    index = None
    for line in text.splitlines()[:100_000]:
        head = re.match(r"GPU (\d{1,4}):", line)
        if head:
            index = int(head[1])
            active[index] = 0
        elif index is not None and re.match(r"\s+Link \d{1,2}: [0-9.]{1,8} GB/s", line):
            active[index] += 1
    return active


def parse_perftest(text: str) -> float | None:
    """Parses an ib_write_bw table; returns the average of its last row in Gbit/s, or None if there is no row.

    A row is: bytes, iterations, peak, average, message rate.

    Source: linux-rdma perftest README: MiB/s unless --report_gbits, and the header line says which.
    """
    average, gigabits = None, "Gb/sec" in text
    for line in text.splitlines()[:100_000]:
        words = line.split()
        if len(words) >= 5 and all(re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", word) for word in words[:5]):
            average = float(words[3])
    if average is None:
        return None
    return average if gigabits else average * 8 * (1 << 20) / 1e9
