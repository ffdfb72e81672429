"""Law: a start, a decision and a failure ask the store a few questions a rank, however many ranks there are."""

from gradwire.bench.studies import startup

MOST_A_RANK = {"start": 7, "decision": 5, "failure": 7}
"""Questions besides looks, which are a matter of time and bounded by `LOOKS_PER_SECOND`."""


def test_every_rank_asks_a_few_questions() -> None:
    few, many = ({cost.name: cost for cost in startup.count(size)} for size in (16, 160))
    for name, most in MOST_A_RANK.items():
        for cost in (few[name], many[name]):
            assert (cost.asked - cost.looks) / cost.ranks <= most, cost
    assert many["start"].nbytes / 160 < 6 * few["start"].nbytes / 16


def test_a_table_of_many_ranks_is_small() -> None:
    table = startup.table(2048)
    assert table.nbytes < 10 * 2048 and table.memory_nbytes < 4 << 20


def test_ranks_with_a_connection_each_start() -> None:
    startup.real(12)
