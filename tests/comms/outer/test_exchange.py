"""Laws of what workers exchange, ranks as threads: every number against a simulation in a few lines."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from gradwire.comms import compression
from gradwire.comms.bootstrap.compat import HashStore
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import is_finite
from gradwire.comms.config import Config
from gradwire.comms.outer import exchange as exchanges
from gradwire.comms.outer.averaging import agreement_of
from gradwire.comms.outer.exchange import OuterExchange
from gradwire.comms.outer.fragments import OuterSettings, cut_into_fragments, wire_nbytes_of
from gradwire.comms.outer.saved import Saved, read, written
from gradwire.comms.session import AveragingSession, SessionRanks
from gradwire.compressors.compiled import native
from gradwire.compressors.composite import make_composite
from support.threads import run_ranks

Result = TypeVar("Result")
CPU = torch.device("cpu")
SHAPES = ((8, 6), (9,), (5, 7), (3,), (40, 4))
VECTORS_TOO = ({"max_dim": 1, "compressor": "waterfill2"},)
QUIET = {"straggler_every": 0, "stall_seconds": 0.0}
AVERAGE = OuterSettings(every=3, fragments=1, delay=0, lr=1.0, momentum=0.0, nesterov=False)


class Model(nn.Module):
    """A few parameters, the same on every rank."""

    def __init__(self, dtype: torch.dtype = torch.float32, scale: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.all = nn.ParameterList(
            torch.randint(-9, 9, (shape[0] * scale, *shape[1:]), generator=generator).to(dtype) for shape in SHAPES
        )

    def flat(self) -> Tensor:
        """All parameters, one after another, float64."""
        return torch.cat([each.detach().reshape(-1).double() for each in self.all])


def move(model: Model, rank: int, step: int) -> None:
    """One step of training: every parameter moves by whole numbers, which every rank can tell of every other."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    with torch.no_grad():
        for each in model.all:
            each += torch.randint(-4, 5, each.shape, generator=generator).to(each.dtype)


def session_of(
    store: Any, name: str, rank: int, size: int, config: Config, previous: AveragingSession | None = None
) -> AveragingSession:
    """A session of ranks as threads, which tells nobody anything."""
    made = AveragingSession(SessionRanks(store, name, rank, size, None), CPU, config, {}, previous=previous)
    made.watch_steps()
    return made


def on_ranks(
    nodes: str,
    body: Callable[[Communicator, Callable[..., OuterExchange]], Result],
    settings: OuterSettings = AVERAGE,
    compressor: str | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Sequence[Result]:
    """Runs `body(communicator, make)`; `make(model)` gives an exchange. A rank's node is its letter in `nodes`.

    `groups` are the ranks that exchange with each other, as those that hold the same shards do; all do by default.
    """
    store = HashStore()

    def run(rank: int) -> Result:
        common: dict[str, Any] = {"timeout": timedelta(seconds=20), "plan": "hierarchical", **QUIET, **options}
        config = Config(hostname=nodes[rank], compressor=compressor, **common)
        number, own = next((at, each) for at, each in enumerate(groups or [range(len(nodes))]) if rank in each)
        session = session_of(store, f"outer{number}", own.index(rank), len(own), config)
        communicator = session.communicator
        agreement = agreement_of(store, rank, len(nodes), config.timeout) if groups else None

        def make(model: Model, **changes: Any) -> OuterExchange:
            named = list(model.named_parameters())
            wanted = replace(settings, **changes)
            parts = cut_into_fragments(named, wanted)
            exchange = OuterExchange(session, parts, wanted, agreement=agreement)
            exchange.copy_from_first_rank(list(model.all))
            return exchange

        try:
            return body(communicator, make)
        finally:
            communicator.close()

    return run_ranks(len(nodes), run)


def simulate(ranks: int, steps: int, settings: OuterSettings) -> list[list[Tensor]]:
    """What `steps` steps leave on every rank, parameter by parameter, in float64: the rule as its page states it."""
    models = [Model(torch.float64) for _ in range(ranks)]
    now = [[each.detach() for each in model.all] for model in models]
    with_parts = cut_into_fragments(list(models[0].named_parameters()), settings)
    groups = [[int(name.split(".")[1]) for name in fragment.names] for fragment in with_parts]
    anchors = [each.clone() for each in now[0]]
    momenta = [torch.zeros_like(each) for each in anchors]
    pending: list[tuple[int, int, Tensor, list[Tensor], bool]] = []
    turn = 0
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            move(model, rank, step)
        warm = step <= settings.warmup_steps
        for _ in range(settings.turns(step)):
            for at in groups[turn % len(groups)]:
                mean = torch.stack([anchors[at] - own[at] for own in now]).mean(0)
                due = step + settings.delay_of(step)
                pending.append((due, at, mean, [own[at].clone() for own in now], warm))
            turn += 1
        for due, at, mean, sent, warmed in [each for each in pending if each[0] == step]:
            if warmed:
                anchors[at] = anchors[at] - mean
            else:
                momenta[at] = settings.momentum * momenta[at] + mean
                direction = mean + settings.momentum * momenta[at] if settings.nesterov else momenta[at]
                anchors[at] = anchors[at] - settings.lr * direction
            for own, before in zip(now, sent, strict=True):
                own[at].copy_(anchors[at] + (own[at] - before))
            assert due == step
        pending = [each for each in pending if each[0] > step]
    return now


RULES = {
    "average every third step": AVERAGE,
    "average every step": replace(AVERAGE, every=1),
    "two fragments in turn": replace(AVERAGE, every=4, fragments=2),
    "taken up later": replace(AVERAGE, every=4, delay=3),
    "outer momentum": replace(AVERAGE, lr=0.5, momentum=0.5),
    "warm-up": OuterSettings(every=4, fragments=2, delay=2, lr=0.5, momentum=0.5, warmup_steps=3),
    "warm-up by turns": replace(AVERAGE, every=6, fragments=2, delay=2, momentum=0.5, warmup_steps=5, warmup_every=2),
    "outer Nesterov, fragments, later": OuterSettings(every=6, fragments=3, delay=2, lr=0.5, momentum=0.5),
}


@pytest.mark.parametrize("nodes", ["ab", "aabb"])
def test_exchanges_are_the_simulation_to_the_bit(nodes: str) -> None:
    """Where float32 holds every number exactly: sums of whole numbers, halves and quarters."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> list[list[Tensor]]:
        found = []
        for rule in RULES.values():
            model = Model()
            exchange = make(model, **{name: getattr(rule, name) for name in rule.__dataclass_fields__})
            for step in range(1, 14):
                move(model, communicator.rank, step)
                exchange.step_ended()
            assert exchange.begun == sum(rule.turns(step) for step in range(1, 14))
            found.append([each.detach().double() for each in model.all])
        return found

    results = on_ranks(nodes, body)
    for number, (name, rule) in enumerate(RULES.items()):
        for rank, expected in enumerate(simulate(len(nodes), 13, rule)):
            for one, other in zip(results[rank][number], expected, strict=True):
                assert torch.equal(one, other), (name, rank)


def test_every_fragment_has_one_turn_in_every_so_many_steps() -> None:
    for every, fragments in ((1, 1), (4, 4), (30, 4), (7, 3), (50, 1)):
        settings = OuterSettings(every=every, fragments=fragments, delay=0)
        turns = [step for step in range(1, 10 * every + 1) if settings.turns(step)]
        warm = replace(settings, warmup_steps=3)
        assert [warm.turns(step) for step in (1, 3)] == [fragments, fragments]
        assert turns == [step for step in range(1, 10 * every + 1) if warm.turns(step + 3)]
        assert [warm.warms_up(number) for number in (3 * fragments, 3 * fragments + 1)] == [True, False]
        assert len(turns) == 10 * fragments
        gaps = {later - earlier for earlier, later in pairwise(turns)}
        assert max(gaps) - min(gaps) <= 1
        assert min(gaps) >= every // fragments


def test_fragments_hold_every_parameter_once_and_are_of_like_size() -> None:
    model = Model()
    for count in range(1, len(SHAPES) + 1):
        fragments = cut_into_fragments(list(model.named_parameters()), OuterSettings(fragments=count, delay=0))
        assert len(fragments) == count
        found = dict(pair for each in fragments for pair in zip(each.names, each.views(each.gather()), strict=True))
        assert sum(len(each.names) for each in fragments) == len(SHAPES)
        assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
        largest = max(each.numel for each in fragments)
        assert largest <= max(160, 4 / 3 * model.flat().numel() / count + 1)  # a parameter of 160 is in one fragment
    with pytest.raises(ValueError, match="`fragments` is 6"):
        cut_into_fragments(list(model.named_parameters()), OuterSettings(fragments=6, delay=0))


def test_fragments_take_the_link_alike_with_what_a_compressor_leaves_dense() -> None:
    """Vectors travel in 32 bits beside matrices in 4: by elements alone, what has most of them would take longest."""
    shapes = [(96, 64)] * 4 + [(64,)] * 40
    named = [(f"p{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]
    compressor = make_composite("int4")
    taken = dict(zip((name for name, _ in named), wire_nbytes_of(named, compressor), strict=True))
    fragments = cut_into_fragments(named, OuterSettings(fragments=2, delay=0), list(taken.values()))
    one, other = (sum(taken[name] for name in each.names) for each in fragments)
    assert max(one, other) <= 1.05 * min(one, other)
    assert [compressor.wire_nbytes(each.layout, 2) for each in fragments] == pytest.approx([one, other], rel=0.1)


def test_sgd_that_averages_every_step_is_data_parallel_training() -> None:
    target = torch.randn(4, 40, generator=torch.Generator().manual_seed(5))

    def train(model: Model, gradient_of: Callable[[int], Tensor], ended: Callable[[], None]) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            model.all[4].grad = gradient_of(0)
            optimizer.step()
            ended()
        return model.flat()

    def gradient(model: Model, rank: int) -> Tensor:
        found: Tensor = model.all[4].detach() - target[rank].view(40, 1)
        return found

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> Tensor:
        model = Model()
        exchange = make(model)
        return train(model, lambda _: gradient(model, communicator.rank), exchange.step_ended)

    plain = Model()
    expected = train(plain, lambda _: torch.stack([gradient(plain, rank) for rank in range(4)]).mean(0), lambda: None)
    for result in on_ranks("aabb", body, replace(AVERAGE, every=1)):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_one_unit_trains_as_without() -> None:
    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> Tensor:
        model = Model()
        exchange = make(model, every=2, fragments=2, delay=1)
        for step in range(8):
            move(model, 0, step)
            exchange.step_ended()
        assert exchange.done == 7
        return model.flat()

    plain = Model()
    for step in range(8):
        move(plain, 0, step)
    for compressor in (None, "waterfill2", "powersgd", "onebit"):  # with which nothing is held back
        assert torch.equal(on_ranks("a", body, compressor=compressor)[0], plain.flat())


DELAYED = OuterSettings(every=4, fragments=2, delay=2, lr=0.7, momentum=0.9, warmup_steps=1)
BORDER = replace(DELAYED, delay=1, warmup_steps=14)


@pytest.mark.parametrize(
    ("compressor", "settings"), [("waterfill2", DELAYED), ("onebit", DELAYED), ("waterfill2", BORDER)]
)
def test_resume_is_bit_for_bit(compressor: str, settings: OuterSettings) -> None:
    """Saved in the middle of a delay, so that an exchange in flight is finished; or in a warm-up of several turns a
    step, over whose end training then goes on, with momentum and delay. Anchors have the same bits on all ranks.
    """
    saved: dict[int, tuple[Any, Any]] = {}

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[Tensor, Tensor]:
        rank = communicator.rank
        model = Model(scale=40)
        exchange = make(model)
        first = 1
        if rank in saved:
            weights, state = saved.pop(rank)
            model.load_state_dict(weights)
            exchange.load_state_dict(state)
            first = 14
        for step in range(first, 26):
            move(model, rank, step)
            exchange.step_ended()
            if step == 13 and first == 1:
                assert (exchange._pending is None) == (settings.delay_of(step) == 0)
                state = exchange.state_dict()
                assert exchange._pending is None
                saved[rank] = ({name: each.clone() for name, each in model.state_dict().items()}, state)
        return model.flat(), torch.cat([fragment.anchor for fragment in exchange.fragments])

    through = on_ranks("aabb", body, settings, compressor)
    resumed = on_ranks("aabb", body, settings, compressor)
    for (one, anchor), (other, other_anchor) in zip(through, resumed, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(anchor, other_anchor)
        assert torch.equal(anchor, through[0][1])


@pytest.mark.parametrize("compressor", ["int8", "waterfill2"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_changes_nothing_on_any_rank(compressor: str, value: float) -> None:
    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> None:
        model = Model(scale=40)
        exchange = make(model, every=2, fragments=1)
        held = exchange.averaging.compression
        assert held is not None
        before: dict[str, Any] = {}
        for step in range(1, 7):
            move(model, communicator.rank, step)
            if step == 4:
                before = held.state_dict()
                anchor = exchange.fragments[0].anchor.clone()
                if communicator.rank == 1:
                    with torch.no_grad():
                        model.all[0][2, 3] = value
                own = model.flat()
            exchange.step_ended()
            if step == 4:
                assert (exchange.done, exchange.skipped) == (1, 1)
                assert torch.equal(model.flat().nan_to_num(7), own.nan_to_num(7))  # keeps an inf apart from it
                assert torch.equal(exchange.fragments[0].anchor, anchor)
                after = held.state_dict()
                residuals = [key for key, value in before.items() if isinstance(value, Tensor)]
                assert residuals
                for key in residuals:
                    assert torch.equal(torch.as_tensor(after[key]), torch.as_tensor(before[key])), key
                with torch.no_grad():
                    model.all[0].nan_to_num_(0, 0, 0)
        assert (exchange.done, exchange.skipped) == (2, 1)
        assert torch.equal(exchange.fragments[0].anchor.double(), model.flat())
        if communicator.rank == 0:
            model.all[0].data[0, 0] = float("inf")
        with pytest.raises(RuntimeError, match="not synchronized"):
            exchange.synchronize()

    on_ranks("ab", body, compressor=compressor)


def test_others_wait_for_a_late_unit_only_when_they_take_up() -> None:
    reached = threading.Event()

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> int:
        model = Model()
        exchange = make(model, every=4, delay=3)
        for step in range(1, 8):
            if communicator.rank == 1 and step == 4:  # the exchange begins after this step
                assert reached.wait(20)
            move(model, communicator.rank, step)
            if communicator.rank == 0 and step == 7:  # after which its result is taken up
                reached.set()
            exchange.step_ended()
        return exchange.done

    assert on_ranks("ab", body) == [1, 1]


def test_ranks_of_different_steps_meet() -> None:
    """The rank that is ahead waits in an exchange that the other one would never begin."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[int, Tensor]:
        model = Model()
        exchange = make(model, every=2, fragments=2)
        for step in range(1, 9 if communicator.rank else 6):
            move(model, communicator.rank, step)
            exchange.step_ended()
        buffer = torch.tensor([float(communicator.rank)])
        exchange.synchronize([buffer])
        assert buffer.item() == 0.5
        return exchange.begun, model.flat()

    (one, first), (other, second) = on_ranks("ab", body, compressor="int8")
    assert one == other == 8
    assert torch.equal(first, second)


def test_a_lost_unit_is_an_error_that_leaves_the_others_as_they_were() -> None:
    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> None:
        model = Model()
        exchange = make(model, every=2)
        move(model, communicator.rank, 1)
        exchange.step_ended()
        if communicator.rank == 1:
            communicator.abort("lost power")
            communicator.close()
            return
        move(model, communicator.rank, 2)
        before = model.flat()
        with pytest.raises(RuntimeError, match=r"rank 1|lost power"):
            exchange.step_ended()
        assert torch.equal(model.flat(), before)

    on_ranks("ab", body, timeout=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("compressor", "rules", "scale", "wanted"),
    [(None, (), 64, 4.0), ("int4", (), 64, 0.7), ("waterfill2", VECTORS_TOO, 512, 0.25)],
)
def test_what_a_unit_receives_is_bounded_by_two_payloads(
    compressor: str | None, rules: Sequence[Mapping[str, object]], scale: int, wanted: float
) -> None:
    """What is sent is received: two stages send 2 (N - 1) / N payloads, where gathering would send N - 1.

    `wanted` is of a payload, in bytes an element; a twentieth of this model are vectors, which compressors leave dense
    unless a rule says otherwise.
    """

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[float, float]:
        model = Model(scale=scale)
        exchange = make(model, every=1)
        move(model, communicator.rank, 1)
        exchange.step_ended()
        rows = communicator.report().rows
        return sum(
            row.wire_nbytes for row in rows if row.level != "intra_node"
        ), exchange.averaging.nic_bytes.exchanged + exchange.averaging.nic_bytes.synchronized

    elements = Model(scale=scale).flat().numel()
    for workers in (2, 4, 8):
        found = on_ranks("abcdefgh"[:workers], body, compressor=compressor, rules=rules)
        average = sum(sent for sent, _ in found) / workers
        payload = average * workers / (workers - 1) / 2
        assert payload / elements == pytest.approx(wanted, rel=0.15 if compressor else 0.01)
        assert found[0][1] == pytest.approx(average, rel=0.2)  # the plan's figure


def test_narrow_parameters_keep_a_wide_anchor() -> None:
    """Many small steps of bfloat16 parameters are not lost between exchanges: the anchor is float32."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[Tensor, Tensor]:
        model = Model(torch.bfloat16)
        exchange = make(model, every=1, lr=1 / 64)
        for step in range(1, 6):
            move(model, communicator.rank, step)
            exchange.step_ended()
        before, anchor = model.flat(), exchange.fragments[0].anchor
        for change in (torch.float32, torch.bfloat16):  # and back
            model.to(change)
            if change == torch.float32:
                with pytest.raises(RuntimeError, match=r"`all\.0` is torch.float32 .*was torch.bfloat16"):
                    exchange.step_ended()
        model.all[4].data = model.all[4].data.t().contiguous().t()
        with pytest.raises(RuntimeError, match=r"`all\.4` .*order \(1, 0\)"):
            exchange.synchronize()
        return before, anchor

    (one, anchor), (other, same) = on_ranks("ab", body)
    assert torch.equal(one, other)
    assert torch.equal(anchor, same)
    assert torch.equal(anchor.bfloat16().double(), one)
    assert not torch.equal(anchor.double(), one)


@pytest.mark.parametrize(
    ("error", "match", "values"),
    [
        (ValueError, "`every` is 0", {"every": 0}),
        (ValueError, "`fragments` is 31", {"fragments": 31}),
        (ValueError, "`delay` is 8.*wanted 0 to 7", {"delay": 8}),
        (ValueError, "`warmup_steps` is -1", {"warmup_steps": -1}),
        (ValueError, "`warmup_every` is 31; wanted 1 to 30", {"warmup_every": 31}),
        (ValueError, "`lr` is 0", {"lr": 0.0}),
        (ValueError, "`momentum` is 1", {"momentum": 1.0}),
        (TypeError, "`every` is 2.0", {"every": 2.0}),
        (TypeError, "`nesterov` is 1", {"nesterov": 1}),
    ],
)
def test_settings_that_make_no_sense_are_refused(error: type[Exception], match: str, values: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        OuterSettings(**values)


def test_ranks_compare_what_must_be_the_same() -> None:
    """All hear of the first difference in the same words; where there is none, nobody says more than a digest."""
    store = HashStore()

    def body(rank: int) -> str:
        agreement = agreement_of(store, rank, 3, timedelta(seconds=20))
        agreement.compare({"lr": "1.0", "weight": "(3, 4)"}, "mend it")
        with pytest.raises(ValueError, match="`weight` is") as caught:
            agreement.compare({"lr": "1.0", "weight": "(3, 5)" if rank == 2 else "(3, 4)"}, "mend it")
        with pytest.raises(ValueError, match="another order"):
            agreement.compare({"a": "1", "b": "2"} if rank else {"b": "2", "a": "1"}, "mend it")
        return str(caught.value)

    first, *others = run_ranks(3, body)
    assert first.startswith("`weight` is (3, 5) on rank 2 and (3, 4) on rank 0")
    assert others == [first, first]


def test_states_of_different_moments_are_refused_on_all_ranks() -> None:
    """One rank's state is older, or cannot be read: no rank loads its own, and the right ones load afterwards."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> int:
        model, rank = Model(), communicator.rank
        exchange = make(model, every=4, fragments=2, delay=0)
        states = []
        for step in range(1, 6):
            move(model, rank, step)
            exchange.step_ended()
            if step in (3, 5):
                states.append(exchange.state_dict())
        weights = model.flat()
        with pytest.raises(ValueError, match="rank 0 is of 2 exchanges and 5 steps, that of rank 1 of 1 and 3"):
            exchange.load_state_dict(states[0 if rank else 1])
        with pytest.raises(ValueError, match="rank 1"):
            exchange.load_state_dict(ValueError("of rank 1: lost") if rank else states[1])
        with pytest.raises(KeyError if rank else ValueError, match="rank 1"):
            exchange.load_state_dict(KeyError("of rank 1: whatever a file may hold") if rank else states[1])
        assert torch.equal(model.flat(), weights)
        move(model, rank, 7)
        exchange.step_ended()
        exchange.load_state_dict(states[1])  # back, inside the running job
        for step in range(6, 14):
            move(model, rank, step)
            exchange.step_ended()
        exchange.synchronize()
        return exchange.begun

    assert on_ranks("ab", body) == [6, 6]


def test_a_state_that_does_not_fit_changes_nothing_on_any_rank() -> None:
    """Damaged on one rank, in what only the compressor can judge, or of other settings; then the right one loads."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> None:
        model, rank = Model(scale=40), communicator.rank
        exchange = make(model, every=2, fragments=2, delay=1, warmup_steps=2, warmup_every=2)
        for step in range(1, 6):
            move(model, rank, step)
            exchange.step_ended()
        state = exchange.state_dict()
        residual = next(key for key in state if key.startswith("compression|") and "residual/" in key)
        short = torch.zeros(1, dtype=torch.int64)
        anchor = next(key for key in state if key.startswith("anchor|"))
        damages: list[tuple[dict[str, Any], str]] = [
            ({residual: short}, "rank 1"),
            ({anchor: torch.full_like(torch.as_tensor(state[anchor]), torch.nan)}, "a NaN or an infinity in 'anchor|"),
            (
                {anchor: torch.as_tensor(state[anchor]) + 1},
                "rank 1 has other parameters at the last exchange",
            ),
            ({"steps": -3}, "-3 for steps"),
            ({"begun": -1}, "-1 for exchanges"),
            ({"warmup_steps": 0}, "`warmup_steps` is 2, and `state` was saved with 0"),
            ({"warmup_every": 1}, "`warmup_every` is 2, and `state` was saved with 1"),
            ({"fragments": 3}, "`fragments` is 2, and `state` was saved with 3"),
        ]
        for change, match in damages:
            with pytest.raises(ValueError, match=match if rank == 0 else None):
                exchange.load_state_dict(state | change if rank == 1 else state)
        found = exchange.state_dict()
        assert found.keys() == state.keys()
        for key, value in state.items():
            same = torch.equal(value, torch.as_tensor(found[key])) if isinstance(value, Tensor) else found[key] == value
            assert same, key
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicator, "state_loaded", lambda **_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                exchange.load_state_dict(state)
        for use in (exchange.step_ended, exchange.synchronize, exchange.state_dict):
            with pytest.raises(RuntimeError, match="load it again on all ranks"):
                use()
        exchange.settings = replace(exchange.settings, every=6, lr=0.5, delay=0)  # which may be others
        exchange.load_state_dict(state)
        for step in range(6, 10):
            move(model, rank, step)
            exchange.step_ended()
        exchange.synchronize()

    on_ranks("ab", body, compressor="waterfill2")


def test_outer_momentum_may_begin_or_end_with_a_saved_state() -> None:
    parameters = list(Model().named_parameters())
    plain, heavy = (cut_into_fragments(parameters, replace(AVERAGE, momentum=momentum)) for momentum in (0.0, 0.9))
    for before, after in ((plain, heavy), (heavy, plain)):
        flats = [(each.anchor, each.momentum) for each in before]
        state = written(Saved(3, 1, flats, {}, ""), before, AVERAGE)
        for (anchor, momentum), fragment in zip(read(state, after, AVERAGE).flats, after, strict=True):
            assert torch.equal(anchor, fragment.anchor)
            assert (momentum is None) == (after is plain) and (momentum is None or not momentum.any())


@pytest.mark.parametrize("compressor", [None, "int8", "waterfill2"])
def test_ranks_of_different_steps_resume_bit_for_bit(compressor: str | None) -> None:
    """Rank 1 skipped a step, and saves before it has begun the exchange that rank 0 is in: it begins it then."""
    saved: dict[int, tuple[Any, Any]] = {}

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[Tensor, Tensor]:
        rank = communicator.rank
        model = Model(scale=40)
        exchange = make(model, every=4, fragments=2, delay=1, lr=0.7, momentum=0.5)
        first = 1
        if rank in saved:
            weights, state = saved.pop(rank)
            model.load_state_dict(weights)
            exchange.load_state_dict(state)
            first = 9
        for step in range(first, 15):
            if rank == 0 or step != 5:
                move(model, rank, step)
                exchange.step_ended()
            if step == 8 and first == 1:
                assert exchange.begun == (3 if rank else 4)
                state = exchange.state_dict()
                assert (exchange.begun, exchange.steps) == (4, 8)
                saved[rank] = ({name: each.clone() for name, each in model.state_dict().items()}, state)
        exchange.synchronize()
        return model.flat(), torch.cat([fragment.anchor for fragment in exchange.fragments])

    through = on_ranks("ab", body, compressor=compressor)
    resumed = on_ranks("ab", body, compressor=compressor)
    for (one, anchor), (other, other_anchor) in zip(through, resumed, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(anchor, other_anchor)


def test_anchors_that_differ_are_an_error_on_all_ranks_and_synchronize_mends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flipped bit of one rank's momentum is found with the fragment's next comparison, and changes nothing more."""
    monkeypatch.setattr(exchanges, "COMPARED_ROUNDS", 1)

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[Tensor, Tensor]:
        model = Model()
        exchange = make(model, every=2, fragments=2, delay=1, lr=0.7, momentum=0.9)
        for step in range(1, 6):
            move(model, communicator.rank, step)
            exchange.step_ended()
        momentum = exchange.fragments[1].momentum
        assert momentum is not None
        if communicator.rank == 2:
            momentum.view(torch.int32)[7] ^= 1 << 3
        with pytest.raises(RuntimeError, match=r"anchors of rank 2 .* differ from those of rank 0.*synchronize"):
            for step in range(6, 10):
                move(model, communicator.rank, step)
                exchange.step_ended()
        for refused in (exchange.step_ended, exchange.state_dict):
            with pytest.raises(RuntimeError, match="anchors of rank 2"):
                refused()
        exchange.synchronize()
        for step in range(10, 14):
            move(model, communicator.rank, step)
            exchange.step_ended()
        exchange.synchronize()
        return model.flat(), torch.cat([part.anchor for part in exchange.fragments])

    first, *others = on_ranks("aabb", body, compressor="int8")
    assert all(torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True))


def test_a_checksum_sees_small_differences_that_cancel() -> None:
    """Law: one unit more in one place and one less in another, or two places swapped, give another checksum."""
    (fragment,) = cut_into_fragments(list(Model(scale=9).named_parameters()), replace(AVERAGE, momentum=0.5))
    torch.manual_seed(0)
    for flat in (fragment.anchor, fragment.momentum):
        assert flat is not None
        flat.normal_()
        words, before = flat.view(torch.int32), fragment.checksum().item()
        for one, other in torch.randint(words.numel(), (50, 2)).tolist():
            kept = words.clone()
            words[one] += 1
            words[other] -= 1
            assert (fragment.checksum().item() == before) == (one == other)
            words.copy_(kept)
            words[one], words[other] = kept[other], kept[one]
            assert (fragment.checksum().item() == before) == (kept[one] == kept[other])
            words.copy_(kept)


def test_the_last_unit_keeps_what_its_compressor_held_back() -> None:
    """All that it has learned is in its parameters in the end, but for what the lost worker had held back of it.

    Rank 0 alone learns; what it sends while there are two counts half. An exchange is given up when rank 1 is lost.
    """
    store = HashStore()

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> tuple[Tensor, Tensor]:
        model, twin = Model(scale=40), Model(scale=40)
        exchange = make(model)
        assert exchange.averaging.compression is not None
        compressor, fragments = exchange.averaging.compression.compressor, exchange.fragments
        learned = cut_into_fragments(list(twin.named_parameters()), exchange.settings)

        def flat(parts: Sequence[Any]) -> Tensor:
            return torch.cat([each.gather() for each in parts]).double()

        def train(steps: range) -> None:
            for step in steps:
                for each in (model, twin):
                    if communicator.rank == 0:
                        move(each, 0, step)
                exchange.step_ended()

        train(range(1, 8))
        held = [torch.zeros(each.numel) for each in fragments]
        for each, back in zip(fragments, held, strict=True):
            compressor.flush(back, each.layout)  # staged, and given up
        if communicator.rank == 1:
            return flat(fragments), torch.cat(held).double()
        assert float(torch.cat(held).norm()) > 0
        unsent = flat(fragments) - torch.cat([each.anchor for each in fragments])
        sent = flat(learned) - flat(cut_into_fragments(list(Model(scale=40).named_parameters()), AVERAGE)) - unsent
        alone = session_of(store, "alone", 0, 1, communicator.config, exchange.averaging.session)
        try:
            exchange.reconnect(alone, agreement_of(store, 0, 1, timedelta(seconds=20)))
            train(range(8, 13))
            exchange.synchronize()
        finally:
            alone.communicator.close()
        assert exchange.averaging.compression.residual_norm() == 0
        return flat(fragments), flat(learned) - sent / 2

    settings = OuterSettings(every=2, fragments=1, delay=1)
    (found, wanted), (_, lost) = on_ranks("ab", body, settings, compressor="waterfill2")
    torch.testing.assert_close(found, wanted + lost, rtol=0, atol=1e-3)


def test_a_failed_exchange_stays_failed() -> None:
    """Whoever asks again, by saving, stepping or loading, gets the error, and nothing changes."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> None:
        model = Model()
        exchange = make(model, every=4, delay=3)
        for step in range(1, 5):
            if communicator.rank == 1 and step == 4:
                communicator.abort("lost power")
                communicator.close()
                return
            move(model, communicator.rank, step)
            exchange.step_ended()
        anchor, weights = exchange.fragments[0].anchor.clone(), model.flat()
        for again in (exchange.state_dict, exchange.state_dict, lambda: exchange.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"rank 1|lost power"):
                again()
        for _ in range(2):
            exchange.step_ended()
        for again in (exchange.step_ended, exchange.step_ended, exchange.synchronize):
            with pytest.raises(RuntimeError, match=r"rank 1|lost power"):
                again()
        assert torch.equal(exchange.fragments[0].anchor, anchor)
        assert torch.equal(model.flat(), weights)
        assert exchange.done == 0

    on_ranks("ab", body, timeout=timedelta(seconds=1))


def test_shards_are_synchronized_all_or_none() -> None:
    """One group's shard is not finite: the other group's ranks, whose own are, keep theirs too, and say why."""

    def body(communicator: Communicator, make: Callable[..., OuterExchange]) -> None:
        model = Model(scale=8)
        exchange = make(model, fragments=2)
        move(model, communicator.rank, 1)
        exchange.step_ended()
        if exchange.averaging.agreement.rank == 3:
            model.all[4].data[0, 0] = float("nan")
        before, anchors = model.flat(), [each.anchor.clone() for each in exchange.fragments]
        with pytest.raises(RuntimeError, match=r"`all\.4` and perhaps more are not finite.*not synchronized"):
            exchange.synchronize()
        assert torch.equal(model.flat().nan_to_num(7), before.nan_to_num(7))
        assert all(torch.equal(one.anchor, other) for one, other in zip(exchange.fragments, anchors, strict=True))
        model.all[4].data.nan_to_num_(0)
        exchange.synchronize()
        assert torch.equal(exchange.fragments[0].anchor, exchange.fragments[0].gather())

    on_ranks("aabb", body, compressor="int8", groups=[[0, 2], [1, 3]])


UNUSUAL = torch.tensor([-0.0, 0.0, 1e-45, -1e-39, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1.0])
"""Zeros of both signs, numbers below the normal ones, some whose differences overflow, and what is not finite."""


@pytest.mark.parametrize("form", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_one_pass_gives_the_bits_of_its_operators(lr: float, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OuterSettings(every=1, fragments=1, delay=1, lr=lr)
    passes: list[str] = []

    def counting(name: str, one_pass: Callable[..., None]) -> None:
        def counted(*arguments: Any) -> None:
            passes.append(name)
            one_pass(*arguments)

        monkeypatch.setattr(native, name, counted)

    counting("outer_set_out", native.outer_set_out)
    counting("outer_take_up", native.outer_take_up)

    def exchanged(in_one: bool) -> list[Tensor]:
        draw = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=draw)
            values.view(-1)[::13] = UNUSUAL[torch.randint(len(UNUSUAL), values.view(-1)[::13].shape, generator=draw)]
            return values

        matrix = {"plain": drawn(33, 7), "transposed": drawn(33, 7).mT, "strided": drawn(33, 14)[:, ::2]}[form]
        parameters = [nn.Parameter(each) for each in (matrix, torch.randn(1, generator=draw), drawn(130))]
        (fragment,) = cut_into_fragments([(str(i), each) for i, each in enumerate(parameters)], settings)
        flat, sent = fragment.empty(), fragment.empty()
        for parameter in (*parameters, *parameters):  # twice: after one that is not all there, before one that is
            parameter.data.add_(drawn(*parameter.shape))
            if in_one:
                fragment.write_pseudo_gradient(flat, sent)
            else:
                fragment.progress(fragment.gather(sent), flat)
            begun = flat.clone()
            parameter.data.mul_(1.1)
            parameters[2].data = parameters[2].data * 0.5  # lies elsewhere now
            flat.mul_(0.3)
            through = parameters[0].square().sum()
            if in_one:
                fragment.apply(flat, sent, settings)
            else:
                fragment.update(flat, settings)
                fragment.add_progress(sent, flat)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                through.backward()  # type: ignore[no-untyped-call]
        return [begun, sent, fragment.anchor, *(each.detach() for each in parameters)]

    one, other = exchanged(True), exchanged(False)
    for mine, wanted in zip(one, other, strict=True):
        assert (mine.isnan() == wanted.isnan()).all()
        bits, wanted_bits = (each.masked_fill(each.isnan(), 0.0).view(torch.int32) for each in (mine, wanted))
        assert bits.equal(wanted_bits)  # the sign of a zero, too, which `equal` of floats does not see
    assert any(each.isnan().any() for each in one)
    assert any(each.isfinite().any() for each in one)
    taken = [] if form == "strided" else ["outer_set_out", "outer_take_up"] if lr == 1.0 else ["outer_set_out"]
    assert passes == taken * 6


def test_one_pass_takes_float32_in_the_memory_of_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    (fragment,) = cut_into_fragments([(str(i), each) for i, each in enumerate(parameters)], AVERAGE)
    assert fragment._runs() == [(each.data_ptr(), each.numel()) for each in parameters]
    for other in (torch.zeros(4, device="meta"), torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2]):
        monkeypatch.setattr(fragment, "_locals", lambda other=other: [parameters[0].detach(), other])
        assert fragment._runs() is None


@pytest.mark.parametrize("value", [float("nan"), float("-nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_element_that_is_not_finite_is_found_anywhere(value: float, dtype: torch.dtype) -> None:
    flat = torch.full((9000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(flat)
    for place in (0, 3, 4095, 4096, 8999):
        flat[place] = value
        assert not is_finite(flat)
        assert is_finite(flat[place + 1 :])
        flat[place] = -0.0


def test_a_large_flat_is_looked_at_by_all_threads_and_a_small_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    all_finite = native.all_finite

    def looking(address: int, numel: int) -> bool:
        looked.append(numel)
        return all_finite(address, numel)

    monkeypatch.setattr(native, "all_finite", looking)
    flat = torch.zeros(compression.ONE_THREAD_NUMEL)
    flat[-1] = float("nan")
    for threads, numels in ((1, [flat.numel() - 1, flat.numel()]), (2, [flat.numel() - 1])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert is_finite(flat[:-1])
        assert not is_finite(flat)
        assert looked == numels
        looked.clear()
