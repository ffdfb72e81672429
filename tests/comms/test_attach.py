"""The hook without a line (GRADWIRE_HOOK), and with one (`gradwire.attach`)."""

import copy
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.emulation.launch import held_port
from gradwire.comms import attach, automatic
from gradwire.comms.backend.register import register
from gradwire.comms.backend.work import FutureWork
from gradwire.comms.bootstrap.compat import GradBucket, comm_hook_name
from support.processes import Processes, Said

BUCKETS_MB = 0.003


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48))


def train(model: nn.Module, steps: int = 3) -> Tensor:
    for step in range(steps):
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        model.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def wrapped(**ddp: Any) -> DistributedDataParallel:
    return DistributedDataParallel(perceptron(), bucket_cap_mb=BUCKETS_MB, **ddp)


def same_as_by_hand(_: int) -> dict[str, object]:
    """What GRADWIRE_HOOK makes of a model, and what the script's own hooks make of that."""
    dist.init_process_group("gloo")
    by_hand = wrapped()
    by_hand.register_comm_hook(gradwire.HookState(by_hand, compressor="int8"), gradwire.comm_hook)
    plain = train(wrapped())
    expected = train(by_hand)
    os.environ["GRADWIRE_HOOK"] = "int8"
    register()  # as torch does at the end of `import torch`, which is behind these processes
    model = wrapped()
    state = automatic.automatic_of(model)
    found: dict[str, object] = {
        "equal": torch.equal(train(model), expected) and not torch.equal(plain, expected),
        "bound": state is not None and state.names.bound and state.report().steps == 3,
        "attached": gradwire.attach(model) is state,
        "name": comm_hook_name(model),
        "copy": comm_hook_name(copy.deepcopy(model)) == "" and automatic.automatic_of(model) is state,
    }
    calls = []

    def own(prefix: str, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(prefix)
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    later = wrapped()
    later.register_comm_hook("own", own)
    found["own hook"] = torch.equal(train(later), plain) and "own" in calls and comm_hook_name(later)
    try:
        later.register_comm_hook("own", own)
    except RuntimeError as error:
        found["second"] = str(error)
    fp16 = wrapped()
    fp16._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined,no-untyped-call]
    bare = wrapped()
    gradwire.attach(bare, compressor="none")
    found["attach replaces"] = automatic.automatic_of(bare) is None and torch.allclose(train(bare), plain)
    found["built-in"] = automatic.automatic_of(fp16) is None and not torch.equal(train(fp16), plain)
    dist.destroy_process_group()
    return found


def test_every_model_has_a_bound_hook_and_a_hook_of_its_own_wins(processes: Processes) -> None:
    for found in processes(2, same_as_by_hand, nodes="ab"):
        second = found.pop("second")
        assert "can only be called once" in second
        assert all(found.values()), found


def with_dgc(_: int) -> str:
    """Whose optimizer check holds: not that of a hook which another one has replaced."""
    dist.init_process_group("gloo")
    register()
    said = ""
    for replace in (True, False):
        model = wrapped()
        if replace:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 32)).sum().backward()
        try:
            optimizer.step()
        except ValueError as error:
            said += f"{replace}: {error}"
    dist.destroy_process_group()
    return said


def test_a_replaced_hook_checks_no_optimizer(processes: Processes) -> None:
    (said,) = processes(1, with_dgc, environment={"GRADWIRE_HOOK": "dgc"})
    assert said.startswith("False: ") and "dgc" in said


class Stand(dist.ProcessGroup):
    """A group that stands for a framework's own, as torchft gives one to DDP."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD

    def allgather(self, *arguments: Any) -> dist.Work:
        for outputs, source in zip(arguments[0], arguments[1], strict=True):
            outputs[0].copy_(source)
        return _done(arguments[0][0])

    def broadcast(self, *arguments: Any) -> dist.Work:
        return _done(arguments[0])

    def getBackendName(self) -> str:
        return "stand"


def _done(tensors: list[Tensor]) -> dist.Work:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return FutureWork(future, timedelta(seconds=10))


def left_alone(_: int) -> dict[str, object]:
    """Models that cannot be hooked, and a process that makes none."""
    dist.init_process_group("gloo")
    register()
    said = Said()
    logging.getLogger("gradwire").addHandler(said)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    skipping = wrapped(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    standing = wrapped(process_group=Stand())
    assert automatic.automatic_of(skipping) is None and automatic.automatic_of(standing) is None
    plain = skipping(torch.ones(2, 32)).sum()
    plain.backward()
    dist.destroy_process_group()
    return {"said": said.lines}


def test_what_cannot_be_hooked_is_left_alone_with_a_word(processes: Processes) -> None:
    first, second = processes(2, left_alone, environment={"GRADWIRE_HOOK": "none"})
    nothing, skips, stands = first["said"]
    assert "no DistributedDataParallel has been made before the first step of SGD" in nothing
    assert "gradwire.fsdp.apply(model" in nothing
    assert "may skip the last bucket of a step (skip_all_reduce_unused_params)" in skips
    assert "has a process group of its own, Stand" in stands
    assert second["said"] == []


def complex_numbers(rank: int, compressor: str) -> list[Tensor]:
    """Gradients of a model with complex parameters."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64, dtype=torch.complex64)))
    state = gradwire.HookState(model, compressor=compressor)
    model.register_comm_hook(state, gradwire.comm_hook)
    rows = torch.randn(8, 64, dtype=torch.complex64, generator=torch.Generator().manual_seed(rank))
    model(rows).abs().sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    state.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_complex_parameters_may_be_compressed(processes: Processes) -> None:
    exact, _ = processes(2, complex_numbers, "none", nodes="ab")
    first, second = processes(2, complex_numbers, "int8", nodes="ab")
    for value, other, wanted in zip(first, second, exact, strict=True):
        assert torch.equal(value, other)
        torch.testing.assert_close(value, wanted, rtol=0, atol=0.02 * wanted.abs().max().item())
    assert any(not torch.equal(value, wanted) for value, wanted in zip(first, exact, strict=True))


def resumed(_: int) -> list[list[str]]:
    """What is warned of where an optimizer goes on: without a state of the hook, and with it."""
    dist.init_process_group("gloo")
    said = Said()
    logging.getLogger("gradwire").addHandler(said)
    found = []
    saved: tuple[Any, Any] | None = None
    for loads in (False, False, True):
        model = wrapped()
        state = gradwire.HookState(model, compressor="int8")
        model.register_comm_hook(state, gradwire.comm_hook)
        optimizer = torch.optim.Adam(model.parameters())
        if saved is not None:
            optimizer.load_state_dict(saved[0])
            if loads:
                state.load_state_dict(saved[1])
        said.lines.clear()
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
        found.append([line for line in said.lines if "goes on from a checkpoint" in line])
        saved = optimizer.state_dict(), state.state_dict()
        state.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_who_goes_on_without_the_hooks_state_is_told(processes: Processes) -> None:
    for fresh, without, loaded in processes(2, resumed, nodes="ab"):
        assert (len(fresh), len(without), len(loaded)) == (0, 1, 0)
        assert "int8 starts without what it held back" in without[0]


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
models = [DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
for model in models:
    model(torch.ones(2, 4)).sum().backward()
print([model._get_ddp_logging_data()["comm_hook"] for model in models])
dist.destroy_process_group()
"""


def run_script(script: str = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with held_port() as port:
        return subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | world | {"MASTER_PORT": str(port)} | variables,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.mark.slow
def test_an_unmodified_script_has_the_hook_and_says_so_once() -> None:
    done = run_script(GRADWIRE_HOOK="none", GRADWIRE_FUSION="1")
    assert done.stdout.strip() == "['automatic_hook', 'automatic_hook']", done.stderr
    assert done.stderr.count("GRADWIRE_HOOK=none: gradwire averages the gradients of every") == 1
    assert done.stderr.count("gradwire: GRADWIRE_HOOK, at the end:\n1 node x 1 rank; 1 all-reduces in 1 steps") == 2


@pytest.mark.slow
def test_a_wrong_value_is_an_error_that_names_the_variable() -> None:
    done = run_script(GRADWIRE_HOOK="int9")
    assert done.returncode != 0 and "ValueError: `GRADWIRE_HOOK` is 'int9'; wanted one of none, fp16" in done.stderr


OPTIONS_ALONE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
HOW = "{how}"
if HOW == "imported":
    import gradwire
    from gradwire.comms.hook import HookState
model = torch.nn.Linear(4, 4)
dist.init_process_group("gradwire" if HOW == "backend" else "gloo")
if HOW != "imported":
    model = DistributedDataParallel(model)
if HOW == "attached":
    import gradwire
    gradwire.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "imported", "attached", "backend"])
def test_options_without_a_hook_are_explained_once_where_ddp_trains(how: str) -> None:
    variables = {"GRADWIRE_COMPRESSOR": "" if how == "backend" else "int8", "GRADWIRE_PLAN": "flat"}
    done = run_script(OPTIONS_ALONE.format(how=how), GRADWIRE_NIC_BYTES_PER_SECOND="", **variables)
    assert done.returncode == 0, done.stderr
    words = (
        "gradwire: `GRADWIRE_PLAN`, `GRADWIRE_COMPRESSOR` are set, but no DistributedDataParallel has a hook of "
        "gradwire's, so they have no effect; write `gradwire.attach(model)` after the model is wrapped, or put "
        "GRADWIRE_HOOK=int8 before the command\n"
    )
    assert (done.stderr.count(words), done.stderr.count("no effect")) == ((1, 1) if how == "plain" else (0, 0))


class Refusing:
    """A finder for which the module of the automatic hook cannot be imported, as `name` cannot, with some words."""

    def __init__(self, words: str, name: str) -> None:
        self._error = ImportError(words, name=name)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == automatic.__name__:
            raise self._error


@pytest.mark.parametrize(
    ("words", "is_being_imported", "is_raised"),
    [("of a module that is not ready", True, False), ("cannot read a partially initialized disk", False, True)],
)
def test_the_hook_waits_for_a_module_that_is_being_imported_whatever_the_error_says(
    words: str, is_being_imported: bool, is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("other")
    other.__spec__ = ModuleSpec("other", None)
    other.__spec__._initializing = is_being_imported  # type: ignore[attr-defined]  # as importlib does
    monkeypatch.setitem(sys.modules, "other", other)
    monkeypatch.delitem(sys.modules, automatic.__name__)
    monkeypatch.setattr(sys, "meta_path", [Refusing(words, "other"), *sys.meta_path])
    monkeypatch.setenv("GRADWIRE_HOOK", "int8")
    if is_raised:
        with pytest.raises(ImportError, match=words):
            register()
    else:
        register()


FIRST = """
import {first}
import gradwire
gradwire.HookState
from gradwire.comms.watch import watch
from torch.nn.parallel import DistributedDataParallel
print(hasattr(DistributedDataParallel.__init__, "__wrapped__"), watch.install.cache_info().currsize == 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["GRADWIRE_HOOK", "GRADWIRE_WATCH"])
@pytest.mark.parametrize("first", ["gradwire.comms.bootstrap.compat", "gradwire.comms.automatic"])
def test_where_a_module_of_gradwire_imports_torch_it_takes_effect_at_the_first_name(first: str, variable: str) -> None:
    """torch loads the backend at the end of its own import, when that module is not complete."""
    done = run_script(FIRST.format(first=first), **{variable: "none" if variable == "GRADWIRE_HOOK" else "1"})
    assert done.stdout == f"{variable == 'GRADWIRE_HOOK'} {variable == 'GRADWIRE_WATCH'}\n", done.stderr


def test_the_variable_and_another_one_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gradwire.Config.automatic() is None
    monkeypatch.setenv("GRADWIRE_HOOK", "onebit")
    monkeypatch.setenv("GRADWIRE_COMPRESSOR_OPTIONS", '{"warmup_steps": 7}')
    config = gradwire.Config.automatic()
    assert config is not None and (config.compressor, config.compressor_options) == ("onebit", {"warmup_steps": 7})
    monkeypatch.setenv("GRADWIRE_COMPRESSOR", "int8")
    with pytest.raises(ValueError, match="`GRADWIRE_HOOK` is 'onebit', but `GRADWIRE_COMPRESSOR` is 'int8'"):
        gradwire.Config.automatic()


class FabricModule(nn.Module):
    """As Lightning Fabric wraps a model: the wrapped one, and the one that the user gave."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original


class FullyShardedDataParallel(nn.Module):
    """Named as torch's."""


class DeepSpeedEngine(nn.Module):
    """Named as DeepSpeed's."""


class Trainer:
    """Of Transformers."""

    model_wrapped = None


def comm_hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Named as gradwire's, and another one's."""
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def attach_to(_: int) -> dict[str, object]:
    dist.init_process_group("gloo")
    found: dict[str, object] = {}
    wraps: dict[str, Callable[[DistributedDataParallel], Any]] = {
        "DDP": lambda ddp: ddp,
        "Fabric": lambda ddp: FabricModule(ddp, ddp.module),
        "compiled": lambda ddp: torch.compile(ddp, backend="eager"),
        "compiled Fabric": lambda ddp: FabricModule(torch.compile(ddp, backend="eager"), ddp.module),  # type: ignore[arg-type]
    }
    for name, wrap in wraps.items():
        ddp = wrapped()
        state = gradwire.attach(wrap(ddp), plan="flat")
        found[name] = state.config.plan_name == "flat" and state.names.bound and comm_hook_name(ddp) == "comm_hook"
    builtin = wrapped()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined,no-untyped-call]
    namesake = wrapped()
    namesake.register_comm_hook(None, comm_hook)
    for name, model in {
        "hooked": ddp,
        "namesake": namesake,
        "built-in": builtin,
        "bare": perceptron(),
        "inside": nn.Sequential(wrapped()),
        "FSDP": FullyShardedDataParallel(),
        "DeepSpeed": DeepSpeedEngine(),
        "trainer": Trainer(),
    }.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            gradwire.attach(model)  # type: ignore[arg-type]
        found[name] = str(caught.value)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError) as failed:
        gradwire.attach(perceptron())
    return found | {"no world": str(failed.value)}


def test_attach_finds_the_ddp_model_or_says_what_to_pass(processes: Processes) -> None:
    (found,) = processes(1, attach_to)
    for name in ("DDP", "Fabric", "compiled", "compiled Fabric"):
        assert found[name] is True, name
    for name, words in {
        "hooked": "has a hook already, gradwire's own, and DDP takes one: keep the state that it was registered with",
        "namesake": "has a hook already, comm_hook, and DDP takes one: register gradwire's hook in its place",
        "built-in": "has a hook already, ",
        "bare": "`model` is a Sequential, not wrapped in DistributedDataParallel: pass what",
        "inside": "holds a DistributedDataParallel: pass `model.0`",
        "FSDP": "FSDP reduces its gradients itself and takes no DDP hook; as the backend gradwire",
        "DeepSpeed": "DeepSpeed reduces its gradients itself",
        "trainer": "`model` is a Trainer; wanted a torch.nn.Module: pass its `model_wrapped`",
        "no world": "start the script with torchrun",
    }.items():
        assert words in found[name], found[name]


@pytest.mark.parametrize(
    ("found", "words"), [("2.5.9", "found 2.5.9: pip install 'lightning>=2.6,<2.8'"), ("2.7.1", ""), ("3.0.0a1", "")]
)
def test_an_older_framework_is_refused_and_a_newer_one_warned_of(
    found: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: found)
    if words:
        with pytest.raises(ImportError, match=re.escape(words)) as caught:
            attach.require("lightning", (2, 6), (2, 7), "gradwire.attach(model)")
        assert "without the adapter: gradwire.attach(model)" in str(caught.value)
    else:
        attach.require("lightning", (2, 6), (2, 7), "gradwire.attach(model)")
        assert ("found 3.0.0a1" in caplog.text) == (found == "3.0.0a1")


def test_a_missing_framework_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install 'nowhere>=1.2,<1.4'"):
        attach.require("nowhere", (1, 2), (1, 3), "")
