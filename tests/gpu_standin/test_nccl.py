"""The stand-in's NCCL keeps NCCL's promises, its bad ones included."""

import signal

import pytest

from gpu_standin.conftest import Jobs

KEPT = {
    "collectives_give_what_their_names_say": 3,
    "sums_of_many_slices_are_right": 3,
    "sums_are_rounded_in_their_dtype": 3,
    "premul_sums_scale_each_ranks_own_input": 3,
    "messages_of_a_group_move_together": 3,
    "a_message_concerns_its_two_ranks_alone": 3,
    "a_collective_waits_for_all_ranks_on_its_stream_alone": 3,
    "the_first_collective_waits_on_the_host_where_it_connects": 2,
    "ranks_that_call_differently_are_told": 2,
    "a_message_of_another_length_is_told": 2,
    "a_rank_that_never_comes_is_waited_for": 3,
    "destroying_waits_for_the_node": 2,
    "destroying_waits_for_no_rank_that_has_aborted": 3,
    "using_a_destroyed_communicator_is_refused": 2,
    "parts_of_a_communicator_sum_for_themselves": 4,
    "nothing_is_left_open": 2,
}
"""Case -> number of ranks."""


@pytest.mark.parametrize("case", KEPT)
def test_nccl_keeps_its_promises(jobs: Jobs, case: str) -> None:
    ranks = jobs.run("nccl.py", case, ranks=KEPT[case])
    assert ranks.statuses == [0] * KEPT[case], ranks.errors


@pytest.mark.parametrize("where", ["connecting", "first", "steady"])
def test_a_killed_rank_leaves_the_others_able_to_abort(jobs: Jobs, where: str) -> None:
    ranks = jobs.run("nccl.py", "a_killed_rank_leaves_the_others_able_to_abort", where, ranks=3)
    assert ranks.statuses == [0, 0, -signal.SIGKILL], ranks.errors


def test_a_killed_rank_becomes_an_error_where_it_is_told_to(jobs: Jobs) -> None:
    case = "a_killed_rank_becomes_an_error_where_it_is_told_to"
    ranks = jobs.run("nccl.py", case, ranks=3, GPU_STANDIN_NCCL_DEAD_PEER="error")
    assert ranks.statuses == [0, -signal.SIGKILL, 0], ranks.errors
    assert "rank 1, process" in ranks.errors[0]


def test_an_injected_error_comes_with_its_kernel(jobs: Jobs) -> None:
    variables = {"GPU_STANDIN_NCCL_FAIL_AT": "3", "GPU_STANDIN_NCCL_FAIL_DEVICE": "0"}
    ranks = jobs.run("nccl.py", "an_injected_error_comes_with_its_kernel", ranks=2, **variables)
    assert ranks.statuses == [0, 0], ranks.errors


@pytest.mark.parametrize(("kernels", "expectation"), [("2", "works"), ("1", "stuck")])
def test_a_full_device_and_two_communicators_in_opposite_orders(jobs: Jobs, kernels: str, expectation: str) -> None:
    case = "two_communicators_in_opposite_orders"
    ranks = jobs.run("nccl.py", case, expectation, ranks=2, GPU_STANDIN_NCCL_KERNELS=kernels)
    assert ranks.statuses == [0, 0], ranks.errors


def test_kernels_start_in_the_hosts_order_where_nccl_is_told_to(jobs: Jobs) -> None:
    variables = {"GPU_STANDIN_NCCL_KERNELS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    ranks = jobs.run("nccl.py", "kernels_start_in_the_hosts_order", ranks=2, **variables)
    assert ranks.statuses == [0, 0], ranks.errors
