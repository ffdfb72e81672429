"""Raw NCCL where there is none: the message says what to install."""

import ctypes

import pytest

from gradwire.bench import way_nccl_raw


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    with pytest.raises(RuntimeError, match=r"`--backend` is nccl-raw.*libnccl\.so\.2.*install a CUDA build"):
        way_nccl_raw._load()
