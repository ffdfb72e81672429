"""Memory that one stream lets go of while another reads it: `keep_until_read` and record_stream."""

from mutations.mutation import Mutation

_RESIDUAL = "compressors/residual.py"
_PLANTED = ("tests/fake_cuda/test_mutations.py::test_gradwire_keeps",)
_WHY = "torch's allocator hands the memory to the stream that allocated it, while this one still reads it."

KEEPING = (
    Mutation(
        "nothing is kept until it is read",
        _RESIDUAL,
        "            value.record_stream(torch.cuda.current_stream(value.device))\n",
        "            pass\n",
        _WHY,
        _PLANTED,
    ),
)
