"""The command line: every flag has nccl-tests' default, and a bad value is an error that names the flag."""

import pytest

from gradwire.bench.nccl_tests.options import parse, parse_size, sizes


def test_defaults_are_those_of_nccl_tests() -> None:
    options = parse(["all_reduce"])
    found = {
        name: getattr(options, name)
        for name in (
            "minbytes",
            "maxbytes",
            "stepbytes",
            "stepfactor",
            "iters",
            "warmup_iters",
            "agg_iters",
            "run_cycles",
            "check",
            "op",
            "datatype",
            "root",
            "blocking",
            "average",
            "report_cputime",
            "cudagraph",
            "timeout",
            "report_timestamps",
            "per_iter_timing",
            "per_iter_skip",
            "memory",
            "output_file",
        )
    }
    assert found == {
        "minbytes": 32 << 20,
        "maxbytes": 32 << 20,
        "stepbytes": 1 << 20,
        "stepfactor": 1.0,
        "iters": 20,
        "warmup_iters": 1,
        "agg_iters": 1,
        "run_cycles": 1,
        "check": 1,
        "op": "sum",
        "datatype": "float",
        "root": 0,
        "blocking": 0,
        "average": 1,
        "report_cputime": 0,
        "cudagraph": 0,
        "timeout": 0,
        "report_timestamps": 0,
        "per_iter_timing": 0,
        "per_iter_skip": 0,
        "memory": 0,
        "output_file": None,
    }


@pytest.mark.parametrize(("text", "nbytes"), [
    ("8", 8), ("64K", 65536), ("1.5g", 3 << 29), ("2M", 2 << 20), (".5k", 512), ("1GB", 1 << 30), ("4mb", 4 << 20),
    ("1 MiB", 1 << 20), ("64 K", 65536), ("2gib", 2 << 30),
])  # fmt: skip
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "words",
    [
        ["-b", "8X"],
        ["-b", ""],
        ["-b", "8B"],
        ["-e", "1GX"],
        ["-e", "1Gbit"],
        ["-b", "-8"],
        ["-e", "1e3"],
        ["-i", "many"],
        ["-f", "0.5"],
        ["-f", "nan"],
        ["-n", "0"],
        ["-n", "2.5"],
        ["-w", "-1"],
        ["-m", "0"],
        ["-N", "-1"],
        ["-c", "yes"],
        ["-o", "xor"],
        ["-d", "fp32"],
        ["-r", "-1"],
        ["-r", "some"],
        ["-z", "4"],
        ["-a", "9"],
        ["-C", "2"],
        ["-G", "-1"],
        ["-T", "x"],
        ["-S", "2"],
        ["-I", "2"],
        ["-K", "-1"],
        ["-K", "20"],
        ["-M", "2"],
        ["-g", "0"],
        ["-t", "2"],
        ["-p", "2"],
        ["-R", "1"],
        ["-J", "result.txt"],
        ["-J", "/no/such/folder/x.json"],
        ["--csv", "result.json"],
        ["--backend", "mystery"],
        ["--algorithm", "magic"],
        ["-b", "64M", "-e", "8"],
        ["-i", "0"],
        ["--unknown"],
    ],
)
def test_a_bad_value_is_an_error_that_names_the_flag(words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0].lstrip("-")):
        parse(["all_reduce", *words])


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(ValueError, match="COLLECTIVE"):
        parse(["all_shuffle"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-b", "8", "-e", "128", "-f", "2"], [8, 16, 32, 64, 128]),
        (["-b", "1M", "-e", "3M"], [1 << 20, 2 << 20, 3 << 20]),
        (["-b", "8", "-e", "30", "-i", "10"], [8, 18, 28]),
        (["-b", "1", "-e", "4", "-f", "1.5"], [1, 2, 3, 4]),
        (["-b", "0", "-e", "2", "-f", "2"], [0, 1, 2]),
    ],
)
def test_rows_go_from_the_smallest_to_the_largest(words: list[str], expected: list[int]) -> None:
    assert sizes(parse(["all_reduce", *words])) == expected


@pytest.mark.parametrize("name", ["sendrecv_perf", "all_reduce_perf", "./build/alltoall_perf", "broadcast"])
def test_a_collective_goes_by_the_name_of_its_program_as_well(name: str) -> None:
    assert parse([name]).collective == name.removeprefix("./build/").removesuffix("_perf")
