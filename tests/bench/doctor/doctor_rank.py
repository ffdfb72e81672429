"""A forked rank of the doctor, which finds its place in the environment: each node has one."""

from gradwire.bench.doctor import command
from gradwire.bench.emulation.fork import ForkedRank


def rank_main(place: ForkedRank, arguments: list[str]) -> int:
    """Examines; what is found is in the file that it writes, and no failure."""
    assert place.nodes == (1,) * len(place.nodes)
    command.main(arguments)
    return 0
