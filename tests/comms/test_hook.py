"""The hook inside real DDP jobs, four processes on two logical nodes: equal to plain DDP, equal on all ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

NODES = "aabb"
TRAINING = {
    "default": 1e-6,
    "many_small_buckets": 1e-6,
    "static_graph": 1e-6,
    "gradient_as_bucket_view": 1e-6,
    "bucket_cap_mb_list": 1e-6,
    "find_unused_parameters": 1e-6,
    "convolution_channels_last": 1e-6,
    "sparse_embedding": 1e-6,
    "no_sync": 1e-6,
    "compiled": 1e-6,
    "sub_group": 1e-6,
    "two_models": 0.0,
    "state_before_model": 1e-6,
    "uneven_inputs": 1e-6,
    "mixed_dtypes": 4e-3,  # one bfloat16 rounding of a weight below 0.5
}
"""Scenario -> largest difference to plain DDP: another order of the same float32 sums."""

Results = list[dict[str, dict[str, object]]]
RunJob = Callable[[Path, Path, str], Results]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_job: RunJob) -> Results:
    return run_job(Path(__file__).parent / "jobs" / "hook_scenarios.py", tmp_path_factory.mktemp("hook"), NODES)


@pytest.mark.parametrize("scenario", TRAINING)
def test_training_equals_plain_ddp(results: Results, scenario: str) -> None:
    for rank, result in enumerate(results):
        assert "raised" not in result[scenario], (rank, result[scenario])
        assert result[scenario]["difference"] <= TRAINING[scenario], rank  # type: ignore[operator]


@pytest.mark.parametrize("scenario", [name for name in TRAINING if name != "sub_group"])
def test_all_ranks_hold_the_same_bits(results: Results, scenario: str) -> None:
    assert len({str(result[scenario]["digest"]) for result in results}) == 1


@pytest.mark.parametrize(
    "scenario", ["default", "many_small_buckets", "static_graph", "find_unused_parameters", "no_sync"]
)
def test_each_backward_with_synchronisation_is_one_step(results: Results, scenario: str) -> None:
    assert [result[scenario]["steps"] for result in results] == [4] * len(NODES)


@pytest.mark.parametrize("scenario", ["compressed", "overflow_under_a_grad_scaler"])
def test_compressed_training_is_equal_on_all_ranks(results: Results, scenario: str) -> None:
    assert len({str(result[scenario].get("digest")) for result in results}) == 1, results[0][scenario]


@pytest.mark.parametrize(
    ("name", "apart"),
    [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 0.02), ("int4", 0.2), ("powersgd", 0.8), ("onebit", 1.0), ("dgc", 1.0)],
)
def test_compressed_training_goes_where_plain_training_goes(results: Results, name: str, apart: float) -> None:
    assert 0 < results[0]["compressed"]["apart"][name] < apart, results[0]["compressed"]  # type: ignore[index]


def test_an_overflow_skips_one_step_and_leaves_no_trace(results: Results) -> None:
    told = [result["overflow_under_a_grad_scaler"] for result in results]
    assert all(each["finite"] and each["scale"] == 512.0 for each in told), told


def test_registering_the_hook_twice_is_refused(results: Results) -> None:
    assert all("can only be called once" in str(result["registered_twice_and_copied"]["error"]) for result in results)


def test_a_copied_state_is_new_and_keeps_its_configuration(results: Results) -> None:
    told = [result["registered_twice_and_copied"] for result in results]
    assert all(each["config"] and not each["same"] for each in told)


def test_the_compiled_autograd_reducer_is_refused_in_clear_words(results: Results) -> None:
    assert all("optimize_ddp" in str(result["compiled_python_reducer"].get("error")) for result in results)
