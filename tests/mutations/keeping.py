"""Memory that one stream lets go of while another reads it: `keep_until_read` and record_stream."""

from mutations.mutation import Mutation

_RESIDUAL = "compressors/residual.py"
_COMPRESSED = "tests/fake_cuda/test_compressed_streams.py::"
_MOVED = (
    f"{_COMPRESSED}test_rebuilt_buckets",
    f"{_COMPRESSED}test_a_loaded_state",
    f"{_COMPRESSED}test_a_state_that_is_loaded_for_other_buckets",
    f"{_COMPRESSED}test_a_run_that_resumes_in_a_new_state",
)
"""What takes state apart and puts it together."""
_WHY = "torch's allocator hands the memory to the stream that allocated it, while this one still reads it."

KEEPING = (
    Mutation(
        "nothing is kept until it is read",
        _RESIDUAL,
        "            value.record_stream(torch.cuda.current_stream(value.device))\n",
        "            pass\n",
        _WHY,
        _MOVED,
    ),
)
