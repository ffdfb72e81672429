"""Law: an optimizer that does not fit the compressor takes no step, one that fits takes all of them."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from gradwire.compressors.optim import first_step
from gradwire.compressors.optim.first_step import check_at_first_step
from gradwire.compressors.optim.fit import take_momentum
from gradwire.compressors.registry import Option, names
from gradwire.compressors.rules import Rule

ADAPTIVE = ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Adafactor"]


def model_with_gradients() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return model


def take_steps(optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        optimizer.step()


@pytest.mark.parametrize("compressor", names())
@pytest.mark.parametrize("kind", ADAPTIVE)
def test_signs_and_selections_are_refused_under_adaptive_optimizers(compressor: str, kind: str) -> None:
    model = model_with_gradients()
    before = model.weight.detach().clone()
    check_at_first_step(model, compressor, {})
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    if compressor not in ("onebit", "dgc"):
        take_steps(optimizer)
        assert not torch.equal(model.weight, before)
        return
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"`optimizer` is {kind} with compressor '{compressor}'.*Use SGD, or one of"
        ):
            optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("compressor", names())
def test_momentum_on_both_sides_is_refused_until_it_is_moved(compressor: str) -> None:
    model = model_with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Option] = {}
    check_at_first_step(model, compressor, options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if compressor in ("onebit", "dgc"):
            with pytest.raises(ValueError, match="take_momentum"):
                optimizer.step()
            take_momentum(optimizer)
        take_steps(optimizer)


def test_an_optimizer_nobody_knows_is_warned_of_once() -> None:
    model = model_with_gradients()
    check_at_first_step(model, "onebit", {})
    optimizer = torch.optim.ASGD(model.parameters())
    with pytest.warns(UserWarning, match="ASGD is untested") as said:
        optimizer.step()
    assert [each.filename for each in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(optimizer)


def test_other_models_are_not_looked_at() -> None:
    model, other = model_with_gradients(), model_with_gradients()
    check_at_first_step(model, "onebit", {})
    take_steps(torch.optim.Adam(other.parameters()))


@pytest.mark.parametrize("first", ["head", "embedding"])
def test_each_optimizer_is_checked_whichever_steps_first(first: str) -> None:
    model = TwoLayers()
    first_step.check_at_first_step(model, "onebit", {})
    sgd = torch.optim.SGD(model.get_submodule(first).parameters(), lr=0.1)
    adam = torch.optim.AdamW(model.get_submodule("embedding" if first == "head" else "head").parameters())
    sgd.step()
    for _ in range(2):
        with pytest.raises(ValueError, match="known not to converge"):
            adam.step()
    sgd.step()


def test_a_rule_for_muons_matrices_is_what_counts_for_muon(caplog: pytest.LogCaptureFixture) -> None:
    """Two optimizers on one model: each is checked against what compresses its own parameters."""
    for rules, said in (([], True), ([Rule(pattern="weight", compressor="int8")], False)):
        model = model_with_gradients()
        caplog.clear()
        check_at_first_step(model, "waterfill4", {}, rules)
        take_steps(torch.optim.AdamW([model.bias], lr=0.1))
        assert not caplog.records
        take_steps(torch.optim.Muon([model.weight], lr=0.1))
        assert len(caplog.records) == said
        assert "compressor 'waterfill4' under Muon" in caplog.text or not said


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("lost", ["sparse gradients", "compressor 'int8' of the rule with pattern 'embedding"])
@pytest.mark.parametrize("kept", [0.9, 0.0])
def test_a_momentum_that_some_parameters_lose_is_warned_of_once(kept: float, lost: str, *, own_group: bool) -> None:
    """The optimizer has none, the main compressor keeps it, and theirs does not."""
    model, rules = TwoLayers(), [] if lost.startswith("sparse") else [Rule(pattern="embedding.*", compressor="int8")]
    model.embedding.weight.grad = torch.eye(*model.embedding.weight.shape)
    if not rules:
        model.embedding.weight.grad = model.embedding.weight.grad.to_sparse()
    check_at_first_step(model, "dgc", {"momentum": kept}, rules)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [model.embedding.weight], "momentum": 0.9 if own_group else 0.0})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        take_steps(optimizer)
    found = [str(each.message) for each in said if "no momentum" in str(each.message)]
    assert len(found) == (kept > 0 and not own_group)
    assert all(lost in text and "Give these parameters a group of their own" in text for text in found)


def test_momentum_is_found_under_its_other_name() -> None:
    """Muon and Dion of the package `dion` call it mu."""
    model = model_with_gradients()
    optimizer = torch.optim.ASGD(model.parameters())
    optimizer.param_groups[0]["mu"] = 0.95
    check_at_first_step(model, "onebit", {})
    with pytest.raises(ValueError, match=r"with momentum 0\.95 and .* would be applied twice"):
        optimizer.step()


def test_who_goes_on_from_a_checkpoint_is_noticed_once() -> None:
    model, called = model_with_gradients(), []
    optimizer = torch.optim.Adam(model.parameters())
    check_at_first_step(model, "fp16", {}, begins=lambda resumes, trained: called.append(resumes))
    take_steps(optimizer)
    assert called == [False]
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    check_at_first_step(model, "fp16", {}, begins=lambda resumes, trained: called.append(resumes))
    take_steps(again)
    assert called == [False, True]


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_checkpoint_that_torch_distributed_loads_is_noticed(loads: bool, late: bool) -> None:
    """torch.distributed.checkpoint makes the optimizer's state by a step without gradients, and loads into it."""
    saved = torch.optim.Adam((before := model_with_gradients()).parameters())
    take_steps(saved)
    kept = get_optimizer_state_dict(before, saved)

    model, called, averaged = nn.Linear(3, 2), list[bool](), list[bool]()
    optimizer = torch.optim.Adam(model.parameters())

    def check() -> None:
        begins = lambda resumes, trained: called.append(resumes)
        check_at_first_step(model, "fp16", {}, begins=begins, averaged=lambda: bool(averaged))

    if not late:
        check()
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    if loads:
        set_optimizer_state_dict(model, optimizer, kept)
    assert called == []
    if late:
        check()
    model(torch.ones(1, 3)).sum().backward()
    averaged.append(True)
    take_steps(optimizer)
    assert called == [loads]


def test_nothing_is_left_behind() -> None:
    gc.collect()
    before = len(first_step._checks)
    passed, forgotten = model_with_gradients(), model_with_gradients()
    for model in (passed, forgotten):
        first_step.check_at_first_step(model, "fp16", {})
    assert len(first_step._checks) == before + 2
    take_steps(torch.optim.Adam(passed.parameters()), 1)
    del model, passed, forgotten
    gc.collect()
    assert len(first_step._checks) == before


class TwoLayers(nn.Module):
    """An embedding and a head, both large enough for a compressor, with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.head(self.embedding(torch.arange(64))).sum().backward()


@pytest.mark.parametrize("main", ["none", "int8", "powersgd"])
@pytest.mark.parametrize("named", ["onebit", "dgc"])
def test_compressors_that_rules_name_are_looked_at_too(main: str, named: str) -> None:
    model = TwoLayers()
    before = model.head.weight.detach().clone()
    check_at_first_step(model, main, {}, [{"pattern": "*.bias"}, Rule(pattern="embedding.*", compressor=named)])
    optimizer = torch.optim.AdamW(model.parameters())
    wanted = (
        rf"`optimizer` is AdamW with compressor '{named}' of the rule with pattern 'embedding\.\*'.*Use SGD, or one of"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=wanted):
            optimizer.step()
    assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    "rules",
    [
        [Rule(pattern="nobody", compressor="dgc")],
        [Rule(pattern="embedding.*"), Rule(pattern="*", max_numel=2048, compressor="int8"), Rule(compressor="dgc")],
    ],
)
def test_rules_that_decide_about_no_parameter_are_not(rules: list[Rule]) -> None:
    model = TwoLayers()
    check_at_first_step(model, "fp16", {}, [*rules, Rule(pattern="late", compressor="onebit")])
    take_steps(torch.optim.Adam(model.parameters()))


def test_momentum_is_looked_for_where_the_rule_applies() -> None:
    """The rule's parameters may have a group without momentum beside others with one, and not the other way round."""
    for inside, outside in ((0.0, 0.9), (0.9, 0.0)):
        model = TwoLayers()
        check_at_first_step(model, "int8", {}, [Rule(pattern="embedding.*", compressor="dgc")])
        optimizer = torch.optim.SGD(
            [
                {"params": model.embedding.parameters(), "momentum": inside},
                {"params": model.head.parameters(), "momentum": outside},
            ],
            lr=0.1,
        )
        if not inside:
            take_steps(optimizer)
            continue
        with pytest.raises(
            ValueError, match=r"'dgc' of the rule with pattern 'embedding\.\*'.*twice.*a group of their own"
        ):
            optimizer.step()


def test_dense_neighbours_have_the_main_compressors_momentum() -> None:
    model = TwoLayers()
    check_at_first_step(model, "onebit", {}, [])
    optimizer = torch.optim.SGD([model.head.weight, model.embedding.weight], lr=0.1)
    optimizer.add_param_group({"params": [model.head.bias], "momentum": 0.9})
    with pytest.raises(ValueError, match=r"compressor 'onebit' has `momentum` 0\.9.*take_momentum"):
        optimizer.step()
