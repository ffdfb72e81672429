"""`compressor="auto"` beside every uniform compressor, on a classifier of many words behind convolutions.

Feeds docs/results/choosing.md.

The model reads bytes of Python's own standard library through convolutions and names the next word of 24,000: its
classifier has nine times the gradients of the rest, as 782 MB beside ResNet-50's 90 MB. Parts, `speed` under
`gradwire emulate --nodes 2 --ranks-per-node 2 --nic 200mbit --`:

    python -m gradwire.bench.studies.layer_choice speed > speed.jsonl
    python -m gradwire.bench.studies.layer_choice quality --steps 300 --speed speed.jsonl > q.jsonl
    python -m gradwire.bench.studies.layer_choice time --speed speed.jsonl --quality q.jsonl
    python -m gradwire.bench.studies.layer_choice model

`speed` replays real gradients, recorded after some training, with waits in place of the computation: the backward
pass of ResNet-50 as `gradwire compare --replay` has it, on 10 Gbit/s, both smaller and slower. All
take turns. `quality` trains with each, two nodes in one process, and evaluates on text that was held out every so
often; "auto" chooses by the arrivals, prices and links that `speed` has found, and by the gradients of its own
training. `time` puts both together: steps until a loss is reached, times the seconds of a step. `model` is no
measurement: what the cost model says at full size. Rank 0 prints JSON lines.
"""

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench.compare.replay import FORWARD_SHARE, ReplayLayer, load_case
from gradwire.bench.studies.convergence.alone import reduce_together
from gradwire.bench.train.text import library_text, split_text
from gradwire.comms.autotune.choose import MOST_OUTSTANDING, LayerChooser, Numbers, predicted_error
from gradwire.comms.bootstrap.agree import Agreement
from gradwire.comms.communicator import Communicator
from gradwire.comms.compression import Compression
from gradwire.comms.plan.choice import LayerCosts, choose_robustly, finish, total_error
from gradwire.comms.plan.codec_price import codec_seconds, layout_of, wire_ratio
from gradwire.comms.plan.cost import EXACT, CodecPrice
from gradwire.comms.plan.planner import byte_costs
from gradwire.compressors.adaptive import CANDIDATES, Adaptive, CandidateSpec, Measurable, takes_whole
from gradwire.compressors.base import Compressor, Layout, Slice
from gradwire.topology.cluster import LEVEL_NAMES, Cluster, Level, Link, uniform_cluster

WORDS, WIDTH, LAYERS, CONTEXT, SAMPLES = 24_000, 192, 4, 64, 64
RATE, MOMENTUM = 0.2, 0.9
SPARSE = ("dgc(density=0.04)", "dgc(density=0.02)", "dgc(density=0.01)")
EVALUATE_EVERY = 10
"""Steps."""
SMOOTHED = 3
"""Evaluations whose median counts as the quality at a step: one alone is lucky now and then."""

BUCKET_NBYTES = 25e6
MESSAGE_SECONDS = 120e-6
"""Of one exchange more, of 30 us a message, in `model`."""
GBITS, NODES = (1.0, 2.5, 10.0, 25.0), 2
"""Of the modelled cards, and how many nodes have one."""
NIC_BITS, STANDS_FOR_BITS = 200e6, 10e9
"""Per second, of the emulated card, and of the one that it stands for."""
TRAINED_STEPS = 25
"""Before gradients are recorded."""

Setting = dict[str, object]

UNIFORM: dict[str, Setting] = {
    "none": {},
    "bf16": {"compressor": "bf16"},
    "fp16": {"compressor": "fp16"},
    "int8": {"compressor": "int8"},
    "int4": {"compressor": "int4"},
    "onebit": {"compressor": "onebit", "compressor_options": {"momentum": 0.0, "warmup_steps": 1}},
    "powersgd": {"compressor": "powersgd", "compressor_options": {"warmup_steps": 1}},
    "powersgd+int8": {"compressor": "powersgd+int8", "compressor_options": {"warmup_steps": 1}},
    "powersgd+int8 16": {"compressor": "powersgd+int8", "compressor_options": {"warmup_steps": 1, "rank": 16}},
    "dgc": {"compressor": "dgc", "compressor_options": {"momentum": 0.0, "warmup_steps": 0, "density": 0.02}},
}


def auto(budget: str | float, sparse: bool = False) -> Setting:
    """With the candidates by default; with sparse ones for SGD besides."""
    options: dict[str, object] = {"plan_every": 20, "first_plan": 5}
    if sparse:
        options["candidates"] = (*CANDIDATES, *SPARSE)
    return {"compressor": f"auto:{budget}", "compressor_options": options}


Node = tuple[Compressor, LayerChooser | None]
"""A node's compressor, and its part in the choice."""


class Reader(nn.Module):
    """Bytes -> logits of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        """(batch, CONTEXT) int64 -> (batch, WORDS)."""
        x = self.bytes(context).transpose(1, 2)
        for convolution in self.convolutions:
            x = x + functional.relu(convolution(functional.layer_norm(x, x.shape[1:])))
        logits: Tensor = self.classifier(functional.layer_norm(x[:, :, -8:].mean(2), (WIDTH,)))
        return logits


@dataclass(frozen=True, slots=True)
class Texts:
    """Bytes, and where words begin in them."""

    data: Tensor
    places: Tensor
    words: Tensor

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Contexts and the words that follow them."""
        chosen = torch.randint(len(self.places), (SAMPLES,), generator=generator)
        offsets = torch.arange(-CONTEXT, 0)
        return self.data[self.places[chosen].unsqueeze(1) + offsets].long(), self.words[chosen]


def read_texts() -> tuple[Texts, Texts]:
    """Training and held-out texts: the standard library's, split as the byte model's are."""
    parts = [bytes(part.tolist()) for part in split_text(library_text())]
    pattern = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
    counts = Counter(found.group() for found in pattern.finditer(parts[0]))
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS))}
    made = []
    for part in parts:
        found = [(m.start(), numbers[m.group()]) for m in pattern.finditer(part) if m.group() in numbers]
        places, words = zip(*(each for each in found if each[0] >= CONTEXT), strict=True)
        data = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        made.append(Texts(data, torch.tensor(places), torch.tensor(words)))
    return made[0], made[1]


def fresh() -> Reader:
    """The model, the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Reader()


def recorded(texts: Texts, rank: int, count: int = 4) -> list[dict[str, Tensor]]:
    """Gradients of some of this rank's batches, after some steps of training on its own."""
    model, generator = fresh(), torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    found = []
    for step in range(TRAINED_STEPS + count):
        context, words = texts.batch(generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(context), words).backward()  # type: ignore[no-untyped-call]  # torch's
        if step < TRAINED_STEPS:
            optimizer.step()
        else:
            found.append({name: cast(Tensor, each.grad).clone() for name, each in model.named_parameters()})
    return found


class Replay(nn.Module):
    """The model's parameters and recorded gradients; the convolutions take a backward pass's time."""

    def __init__(self, gradients: list[dict[str, Tensor]], seconds: float) -> None:
        super().__init__()
        self.model, self.gradients, self.number = fresh(), gradients, 0
        self.forward_seconds = seconds * FORWARD_SHARE
        layers = sum(parameter.dim() == 3 for parameter in self.model.parameters())
        self.layer_seconds = seconds * (1 - FORWARD_SHARE) / layers

    def forward(self, start: Tensor) -> Tensor:
        """Waits for the forward pass; a scalar that requires a gradient, through."""
        time.sleep(self.forward_seconds)
        self.number += 1
        now = self.gradients[self.number % len(self.gradients)]
        for name, parameter in self.model.named_parameters():
            seconds = self.layer_seconds if parameter.dim() == 3 else 0.0
            start = ReplayLayer.apply(start, parameter, now[name], seconds)  # type: ignore[no-untyped-call]
        return start


def wrapped(model: nn.Module, setting: Setting, rate: float | None = None) -> tuple[nn.Module, gradwire.HookState]:
    """The model with the hook; buckets as small beside the model as DDP's are beside 872 MB."""
    nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=25 / 872 * nbytes / 1e6)
    return ddp, gradwire.attach(ddp, config=gradwire.Config.from_env(nic_bytes_per_second=rate, **setting))


def adaptive_of(state: gradwire.HookState) -> Adaptive | None:
    """The compressor of a state, where it is "auto"."""
    compression = state._connected("the study").compression
    found = None if compression is None else compression.compressor
    return found if isinstance(found, Adaptive) else None


def speed(settings: dict[str, Setting], turns: int, steps: int) -> Iterator[dict[str, object]]:
    """The median step of each, in turns."""
    torch.set_num_threads(1)
    nbytes = sum(4 * parameter.numel() for parameter in fresh().parameters())
    smaller = 872e6 / nbytes
    slower = STANDS_FOR_BITS / NIC_BITS / smaller
    case = load_case("resnet50")
    gradients = recorded(read_texts()[0], dist.get_rank())
    entrants = {}
    for name, setting in settings.items():
        entrants[name] = wrapped(Replay(gradients, case.step_seconds * slower), setting, NIC_BITS / 8)
    start = torch.zeros((), requires_grad=True)

    def turn(model: nn.Module, count: int) -> list[float]:
        times = []
        for _ in range(count):
            dist.barrier()
            began = time.perf_counter()
            model(start).backward()
            times.append(time.perf_counter() - began)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return cast(list[float], slowest.tolist())

    yield {"smaller": smaller, "slower": slower, "step_alone": case.step_seconds * slower, "mb": nbytes / 1e6}
    for name, (model, _) in entrants.items():
        turn(model, 7 if str(settings[name].get("compressor")).startswith("auto") else 3)
    seen: dict[str, list[float]] = {name: [] for name in entrants}
    for _ in range(turns):
        for name, (model, _) in entrants.items():
            seen[name] += turn(model, steps)[1:]
    for name, (_, state) in entrants.items():
        report, adaptive = state.report(), adaptive_of(state)
        yield {
            "name": name,
            "step_seconds": statistics.median(seen[name]),
            "fastest": min(seen[name]),
            "choices": None if report.choices is None else str(report.choices),
            "notes": None if adaptive is None else adaptive.notes,
        }
        state.close()


def error_shares(gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    """Squared error over the gradient's, by kind of layer and candidate, from two nodes' gradients of one step."""
    adaptive = Adaptive(0.5, cast(dict[str, object], auto(0.5, sparse=True)["compressor_options"]))
    found = {}
    for kind, name in (("wide", "classifier.weight"), ("other", "convolutions.2.weight")):
        flats = [each[name].flatten() for each in gradients]
        item = Slice(name, tuple(gradients[0][name].shape), 0, 0, flats[0].numel())
        norm, total = sum(float(flat.square().sum()) for flat in flats), float(sum(flats).square().sum())  # type: ignore[union-attr]
        left_out = [0.0]
        for candidate in adaptive.candidates[1:]:
            assert isinstance(candidate, Measurable)
            left_out.append(sum(float(candidate.left_out(flat, item)) for flat in flats))
        numbers = Numbers(norm, len(flats) * total, left_out)
        found[kind] = [
            predicted_error(adaptive, number, numbers, len(flats)) / norm for number in range(len(adaptive.candidates))
        ]
    return found


def model(budgets: Sequence[str | float]) -> Iterator[dict[str, object]]:
    """By the model alone, at full size: `NODES` of 8 GPUs; ResNet-50's step on a 3090, gradients in buckets of 25 MB.

    Errors are those of the recorded gradients: a classifier's or a table's for matrices with a side of 8,192 or more,
    a convolution's for the rest. Codecs move 0.42 TB/s, an A10's.
    """
    texts = read_texts()[0]
    shares = error_shares([recorded(texts, rank, count=1)[0] for rank in range(2)])
    specs = Adaptive(0.5, cast(dict[str, object], auto(0.5, sparse=True)["compressor_options"])).specs
    yield {"errors": {kind: dict(zip([s.text for s in specs], row, strict=True)) for kind, row in shares.items()}}
    wide = [("classifier.weight", (100_000, 2048))]
    for name in ("resnet50+100k", "resnet50", "vgg16", "bert_base", "swin_t"):
        case = load_case(name.partition("+")[0])
        shapes = [each for each in case.parameters if each[0] != "fc.weight"] if "+" in name else case.parameters
        shapes = [*shapes, *(wide if "+" in name else [])]
        for gbit in GBITS:
            link = Link(30e-6, gbit * 1e9 / 8, 1, 8)
            inside = Link(10e-6, 12e9)
            cluster = uniform_cluster((8, NODES), (Level(LEVEL_NAMES[0], inside), Level(LEVEL_NAMES[1], link)))
            layers, norms = _layers(shapes, case.step_seconds * (1 - FORWARD_SHARE), cluster, specs, shares)
            yield from _compared(name, gbit, case.step_seconds * FORWARD_SHARE, layers, norms, specs, budgets)
    long = [layer for _ in range(-(-500 // len(layers))) for layer in layers][:500]
    yield from _compared("500 layers", gbit, 0.0, long, float(len(long)), specs, budgets)


def _layers(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    backward_seconds: float,
    cluster: Cluster,
    specs: Sequence[CandidateSpec],
    shares: Mapping[str, Sequence[float]],
) -> tuple[list[LayerCosts], float]:
    """What each matrix costs, the last one first; all elements have gradients of one size."""
    nodes, done, norms, layers = len(cluster.nodes), 0.0, 0.0, []
    matrices = [shape for _, shape in reversed(shapes) if len(shape) > 1 and math.prod(shape) >= 1024]
    prices = [CodecPrice(each.text, 1.0, codec_seconds(each.name, 0.42e12)) for each in specs]
    costs = [byte_costs(cluster, "hierarchical", EXACT if not n else price) for n, price in enumerate(prices)]
    made = [spec.make() for spec in specs]
    bucket, waiting, transfer = 0.0, 0, 0
    for shape in matrices:
        numel = math.prod(shape)
        bucket += 4 * numel
        done += backward_seconds / len(matrices)
        layout = Layout((Slice("layer", shape, 0, 0, numel),))
        part = min(1.0, 4 * numel / BUCKET_NBYTES)
        seconds = tuple(
            cost.seconds(
                4 * numel,
                wire_ratio(candidate, layout, nodes) if number else 1.0,
                price,
                part=part,
                whole=takes_whole(candidate, layout.slices[0]),
            )
            for number, (cost, candidate, price) in enumerate(zip(costs, made, prices, strict=True))
        )
        kind = "wide" if max(shape[:2]) >= 8192 else "other"
        errors = [share if share <= MOST_OUTSTANDING else math.inf for share in shares[kind]]
        norm = 1.0  # of each layer alike, as layers that learn at one pace have
        layers.append(LayerCosts(done, seconds, tuple(norm * error for error in errors), transfer))
        norms += norm
        waiting += 1
        if bucket >= BUCKET_NBYTES:  # the bucket leaves with its last gradient
            layers[-waiting:] = [replace(each, arrival=done) for each in layers[-waiting:]]
            bucket, waiting, transfer = 0.0, 0, transfer + 1
    return layers, norms


def _compared(
    name: str,
    gbit: float,
    forward_seconds: float,
    layers: Sequence[LayerCosts],
    norms: float,
    specs: Sequence[CandidateSpec],
    budgets: Sequence[str | float],
) -> Iterator[dict[str, object]]:
    uniform = {}
    for number, spec in enumerate(specs):
        choice = [number] * len(layers)
        uniform[spec.text] = finish(layers, choice) + forward_seconds, total_error(layers, choice)
    for budget in budgets:
        allowed = uniform[budget][1] if isinstance(budget, str) else budget * norms
        began = time.process_time()
        named = [spec.text for spec in specs].index(budget) if isinstance(budget, str) else None
        choice = choose_robustly(layers, allowed, MESSAGE_SECONDS, named)
        took = time.process_time() - began
        step = finish(layers, choice) + forward_seconds
        best = min((seconds, text) for text, (seconds, error) in uniform.items() if error <= allowed)
        yield {
            "model": name,
            "gbit": gbit,
            "budget": budget,
            "allowed": allowed / norms,
            "step_ms": step * 1e3,
            "best_uniform": best[1],
            "best_uniform_ms": best[0] * 1e3,
            "exact_ms": uniform["none"][0] * 1e3,
            "gain": best[0] / step,
            "layers": len(layers),
            "choice_ms": took * 1e3,
            "chosen": dict(Counter(specs[number].text for number in choice)),
            "wide": specs[choice[0]].text,
        }


class Here:
    """Two nodes in this process, as far as `LayerChooser` asks for them."""

    def __init__(self) -> None:
        link = Link(1e-3, 25e6)
        self.cluster = uniform_cluster((2, 2), (Level(LEVEL_NAMES[0], link), Level(LEVEL_NAMES[1], link)))
        self.device = torch.device("cpu")
        self.routes = self

    def compressed_name(self) -> str:
        """As `Routes.compressed_name`."""
        return "hierarchical"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """As `Communicator.alone`."""
        yield

    def rejoin(self) -> None:
        """Nothing is elsewhere."""

    def state_loaded(self) -> None:
        """Nothing is planned."""


def nodes_of(setting: Setting, numels: Mapping[str, int], notes: Mapping[str, object] | None) -> list[Node]:
    """The two nodes' compressors, and their parts in the choice."""
    config = gradwire.Config.from_env(**setting)
    name = config.compressor_name or "none"
    found = []
    for rank in range(2 if name != "none" else 0):
        compression = Compression(name, config.compressor_options, (), rank, 2, config.error_budget)
        compression.compressor.bind_model(numels)
        chooser = None
        if isinstance(compression.compressor, Adaptive):
            compression.compressor.notes = dict(notes or {})
            chooser = LayerChooser(cast(Communicator, Here()), compression, cast(Agreement, None))
        found.append((compression.compressor, chooser))
    return found


def average(nodes: Sequence[Node], flats: Sequence[Tensor], layout: Layout, transfers: Sequence[Layout]) -> Tensor:
    """What the nodes' compressors make of the mean of their gradients; chooses anew where it is time."""
    for flat in flats:
        flat.mul_(1 / len(flats))
    if not nodes:
        return flats[0] + flats[1]
    for compressor, chooser in nodes:
        if chooser is not None and isinstance(compressor, Adaptive):
            chooser.step_began(compressor.step)
    reduce_together([compressor for compressor, _ in nodes], flats, layout)
    choosers = [chooser for _, chooser in nodes if chooser is not None]
    auto = [compressor for compressor, _ in nodes if isinstance(compressor, Adaptive) and compressor.measuring]
    if auto:
        owns = []
        for each in auto:
            each.measuring = False
            numbers = {name: list(astuple(found)) for name, found in each.collect().items()}
            owns.append({"numbers": numbers, "measuring": 0.0, "step": 0.0})
        decided = choosers[0].decide(owns, transfers)
        for chooser in choosers:
            chooser.follow(decided)
    return flats[0]


def quality(
    settings: dict[str, Setting], steps: int, notes: Mapping[str, Mapping[str, object]]
) -> Iterator[dict[str, object]]:
    """Trains with each; the losses on held-out files so far, every so many steps.

    Args:
        settings: By name.
        steps: Of each training.
        notes: What `speed` has found, by the name of the setting: what "auto" chooses by besides the gradients.
    """
    torch.set_num_threads(1)
    training, held_out = read_texts()
    for name, setting in settings.items():
        model = fresh()
        parameters = dict(reversed(list(model.named_parameters())))
        layout = layout_of([(each, tuple(parameter.shape)) for each, parameter in parameters.items()])
        nodes = nodes_of(setting, {each: p.numel() for each, p in parameters.items()}, notes.get(name))
        generators = [torch.Generator().manual_seed(node) for node in range(2)]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (steps / 20)))
        curve: list[tuple[int, float]] = []
        chosen: list[dict[str, float]] = []
        for step in range(1, steps + 1):
            flats = []
            for generator in generators:
                context, words = training.batch(generator)
                optimizer.zero_grad()
                functional.cross_entropy(model(context), words).backward()  # type: ignore[no-untyped-call]  # torch's
                flats.append(torch.cat([cast(Tensor, each.grad).reshape(-1) for each in parameters.values()]))
            total = average(nodes, flats, layout, buckets_of(layout))
            for item, parameter in zip(layout.slices, parameters.values(), strict=True):
                parameter.grad = total[item.start : item.stop].view_as(parameter)
            optimizer.step()
            schedule.step()
            choices = nodes[0][1].choices if nodes and nodes[0][1] is not None else None
            if choices is not None and (not chosen or chosen[-1]["step"] != choices.step):
                kinds = dict(Counter(each.compressor for each in choices.layers))
                chosen.append({"step": choices.step, "seconds": choices.seconds, "error": choices.error} | kinds)
            if step % EVALUATE_EVERY == 0:
                curve.append((step, evaluated(model, held_out)))
                last = None if choices is None else str(choices)
                yield {"name": name, "curve": curve, "chosen": chosen, "choices": last}


def buckets_of(layout: Layout) -> list[Layout]:
    """Whole parameters, in the buckets that `wrapped` has DDP make."""
    found, start = [], 0
    limit = 25 / 872 * layout.numel
    for item in layout.slices:
        if item.stop - start >= limit:
            found.append(layout.cut(start, item.stop))
            start = item.stop
    return [*found, layout.cut(start, layout.numel)] if start < layout.numel else found


def evaluated(model: nn.Module, held_out: Texts) -> float:
    """The mean loss of some batches, the same ones each time."""
    losses, chooser = [], torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _ in range(12):
            context, words = held_out.batch(chooser)
            losses.append(functional.cross_entropy(model(context), words))
    return torch.stack(losses).mean().item()


def notes_of(notes: Mapping[str, Any]) -> dict[str, object]:
    """What "auto" noted in a replay, for the training: a parameter's name has no "model." there."""
    arrivals = {name.removeprefix("model."): at for name, at in notes["arrivals"].items()}
    return dict(notes) | {"arrivals": arrivals, "corrections": {}, "wait": 20}


def steps_until(curve: Sequence[tuple[int, float]], loss: float) -> int | None:
    """The first step from which on the median of some evaluations is no worse; None where there is none."""
    for place in range(len(curve) - SMOOTHED + 1):
        if statistics.median(value for _, value in curve[place : place + SMOOTHED]) <= loss:
            return curve[place + SMOOTHED // 2][0]
    return None


def time_to_quality(
    step_seconds: Mapping[str, float], curves: Mapping[str, Sequence[tuple[int, float]]]
) -> Iterator[dict[str, object]]:
    """Steps until the loss at which exact training is after four fifths of its steps, and the seconds they take."""
    exact = curves["none"]
    target = statistics.median(loss for _, loss in exact[int(0.8 * len(exact)) - 1 :][:SMOOTHED])
    for name, curve in curves.items():
        needed = steps_until(curve, target)
        yield {
            "name": name,
            "target": target,
            "final": statistics.median(loss for _, loss in curve[-SMOOTHED:]),
            "steps": needed,
            "step_seconds": step_seconds.get(name),
            "seconds": None if needed is None or name not in step_seconds else needed * step_seconds[name],
        }


def rows_of(file: str | None) -> list[dict[str, Any]]:
    """The JSON lines of a file, without what is none."""
    if file is None:
        return []
    return [json.loads(line) for line in Path(file).read_text().splitlines() if line.startswith("{")]


def print_lines(rows: Iterable[dict[str, object]], shown: bool = True) -> int:
    """Prints each as JSON as soon as it is there, unless another rank does; returns the exit status, 0."""
    for row in rows:
        if shown:
            print(json.dumps(row), flush=True)
    return 0


def main(argv: list[str]) -> int:
    """Runs one rank; returns 0.

    Args:
        argv: Words after the module's name.
    """
    parser = argparse.ArgumentParser(prog="gradwire.bench.studies.layer_choice", description=__doc__)
    parser.add_argument("part", choices=("speed", "quality", "time", "model"))
    parser.add_argument("--only", help="names with commas between them")
    parser.add_argument("--budgets", default="int8,int4,0.1", help="of auto, with commas between them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, the first does not count; or of a training")
    parser.add_argument("--speed", help="what `speed` has printed")
    parser.add_argument("--quality", nargs="*", default=(), help="what `quality` has printed")
    options = parser.parse_args(argv)
    if options.part == "time":
        timed = {row["name"]: row["step_seconds"] for row in rows_of(options.speed) if "name" in row}
        curves = {row["name"]: row["curve"] for file in options.quality for row in rows_of(file)}
        return print_lines(time_to_quality(timed, curves))
    settings = dict(UNIFORM)
    words = options.budgets.split(",") if options.budgets else []
    budgets = [float(word) if word[0].isdigit() else word for word in words]
    settings |= {f"auto {budget}": auto(budget) for budget in budgets}
    settings |= {f"auto {budget} sparse": auto(budget, sparse=True) for budget in budgets}
    if options.part == "model":
        return print_lines(model(budgets))
    if options.only:
        settings = {name: settings[name] for name in options.only.split(",")}
    if options.part == "quality":
        notes = {row["name"]: notes_of(row["notes"]) for row in rows_of(options.speed) if row.get("notes")}
        return print_lines(quality(settings, options.steps, notes))
    dist.init_process_group("gloo")
    print_lines(speed(settings, options.turns, options.steps), shown=dist.get_rank() == 0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
