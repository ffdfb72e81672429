"""A missing or old torch: what is wrong and what to do, in one line, wherever gradwire is first used."""

import importlib
import sys
from types import ModuleType

import pytest

import gradwire
from gradwire.__main__ import main
from gradwire.comms.bootstrap.compat import numbers_from_zero
from gradwire.comms.bootstrap.requirement import require_torch, too_old

WANTED = "gradwire needs torch 2.13 or newer"


@pytest.mark.parametrize("version", ["2.12.1", "2.9.0+cu128", "1.13.1", "2.12.0a0+git12ab"])
def test_an_old_release_is_too_old(version: str) -> None:
    assert too_old(version) == f"{WANTED}, and finds {version}"


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0a0+git12ab", "2.15.0+cpu", "3.0.0", "vendor-7"])
def test_a_release_that_may_do_is_taken(version: str) -> None:
    assert too_old(version) is None


def test_this_torch_will_do() -> None:
    require_torch()


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` raises ModuleNotFoundError


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.__version__ = "2.5.1"  # type: ignore[attr-defined]
    torch.__path__ = ["/somewhere/torch"]
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.usefixtures("missing")
def test_a_missing_torch_is_named_with_the_line_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{WANTED}: pip install torch"):
        gradwire.__getattr__("HookState")
    assert main(["predict", "--help"]) == 1
    assert capsys.readouterr().err.startswith(f"gradwire predict: {WANTED}: pip install torch")


@pytest.mark.usefixtures("old")
def test_an_old_torch_is_named_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError, match=r"finds 2\.5\.1 in /somewhere/torch: pip install --upgrade torch"):
        gradwire.__getattr__("HookState")
    assert main(["bench"]) == 1
    assert "finds 2.5.1" in capsys.readouterr().err


@pytest.mark.usefixtures("missing")
def test_another_missing_module_is_not_blamed_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'sympy'", name="sympy")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        require_torch()


@pytest.mark.parametrize(("version", "alone"), [("2.13.0+cpu", False), ("2.14.1+cu130", True), ("3.0.0", True)])
def test_backends_are_numbered_only_where_torch_does_not_warn_of_it(version: str, alone: bool) -> None:
    assert numbers_from_zero(version) is alone
