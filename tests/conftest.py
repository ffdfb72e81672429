"""Marks of the whole suite: what a machine cannot run is skipped with the reason, or fails where it is required."""

import pytest

from gradwire.bench.namespaces import available


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", action="append", default=[], metavar="MARK", help="fail instead of skipping: netns")


def no_gpu() -> str | None:
    """The reason why GPU tests cannot run here."""
    import torch  # here: most of the suite's folders do without it

    return None if torch.cuda.is_available() else f"no CUDA device (torch {torch.__version__})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (without := no_gpu()) is not None:
        pytest.skip(without)
    if item.get_closest_marker("netns") is None or (reason := available()) is None:
        return
    if "netns" in item.config.getoption("--require"):
        pytest.fail(f"`--require=netns` was given, but {reason}", pytrace=False)
    pytest.skip(reason)
