"""A telling part of PyTorch's own suite on "gradwire", compared with gloo; `make conformance` runs all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_reduce_product",
    "test_all_reduce_min",
    "test_all_reduce_group_sum",
    "test_all_reduce_full_group_sum",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_coalesced_group_sum",
    "test_all_gather",
    "test_all_gather_group",
    "test_all_gather_complex",
    "test_all_gather_coalesced_simple",
    "test_all_gather_coalesced_with_empty",
    "test_broadcast",
    "test_broadcast_group",
    "test_reduce_sum",
    "test_reduce_group_sum",
    "test_scatter",
    "test_gather",
    "test_barrier",
    "test_barrier_group",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_get_backend",
    "test_destroy_full_group",
    "test_new_subgroups",
    "test_all_gather_object_default_pg",
    "test_get_future",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_grad_div_uneven_inputs",
]


def test_gradwire_passes_what_gloo_passes(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's suite needs expecttest")
    script = Path(__file__).resolve().parents[2] / "conformance.py"
    command = [
        sys.executable,
        str(script),
        "--layouts",
        "gloo",
        "gradwire on 2x2",
        "--logs",
        str(tmp_path),
        "--only",
        *TESTS,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradwire on 2x2: 0 passed" not in done.stdout and "WRONG" not in done.stdout, done.stdout
