"""The hook's options about sums, in DDP: four processes on two logical nodes, against plain DDP's gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comms.checkpoint import unpack
from support.processes import Processes

NODES = "aabb"


class Model(nn.Module):
    """Layers of two dtypes between each other, behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 48, sparse=True)
        self.layers = nn.ModuleList(
            nn.Linear(48, 48, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
        )

    def forward(self, places: Tensor) -> Tensor:
        value: Tensor = self.table(places)
        for layer in self.layers:
            value = torch.tanh(layer(value.to(next(layer.parameters()).dtype)))
        return value.float().square().sum()


def gradients(**options: Any) -> tuple[list[Tensor], list[bool], int]:
    """Of the second step: values, which of them are sparse, and its all-reduces; plain DDP's without options."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.002)
    state = gradwire.HookState(model, **options) if options else None
    if state is not None:
        model.register_comm_hook(state, gradwire.comm_hook)
    launches = before = 0
    for _ in range(2):
        model.zero_grad()
        model(torch.arange(6) + 3 * dist.get_rank()).backward()
        total = state.report().buckets if state else 0
        launches, before = total - before, total
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if state is not None:
        state.close()
    return [each.to_dense().float() for each in found], [each.is_sparse for each in found], launches


def apart(values: list[Tensor], wanted: list[Tensor], factor: float) -> float:
    """The largest relative distance of a gradient."""
    return max(
        float((value - factor * each).norm() / (factor * each).norm())
        for value, each in zip(values, wanted, strict=True)
    )


def compare_options(_: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    plain, kinds, _ = gradients()
    wide, wide_kinds, many = gradients(reduction={"predivide": 2.0, "sum_dtype": "float32", "sparse_as_dense": True})
    late, late_kinds, few = gradients(reduction={"average": False, "sparse_as_dense": False}, fusion="delayed")
    found = {
        "apart": (apart(wide, plain, 1.0), apart(late, plain, len(NODES))),
        "kinds": wide_kinds == late_kinds == kinds,
        "launches": (many, few),
        "sums": [str(each.double().sum().item()) for each in (*wide, *late)],
        "kept": sparse_overflow(),
        "wrapped": gradwire.wrap(nn.Linear(2, 2), fusion="delayed")[1].config.fusion_mb,
        "skipping": refusal_of(DistributedDataParallel(
            nn.Linear(2, 2), find_unused_parameters=True, skip_all_reduce_unused_params=True
        )),
    }  # fmt: skip
    return found


def sparse_overflow() -> bool:
    """Whether an infinity in a sparse gradient alone leaves what is held back of the dense ones as it was."""
    model = DistributedDataParallel(Model().float(), bucket_cap_mb=0.002)
    state = gradwire.HookState(model, compressor="int8")
    model.register_comm_hook(state, gradwire.comm_hook)
    places = torch.arange(6) + 3 * dist.get_rank()
    for _ in range(3):  # DDP has rebuilt its buckets
        model(places).backward()
    before = unpack(state.state_dict(), dist.get_rank(), len(NODES))
    handle = model.module.table.weight.register_hook(lambda gradient: gradient * float("inf"))
    model(places).backward()
    handle.remove()
    after = unpack(state.state_dict(), dist.get_rank(), len(NODES))
    state.close()
    assert before is not None and after is not None
    held = [key for key in before if "residual" in key or "server" in key]
    assert held, list(before)
    return all(torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in held)


def refusal_of(model: DistributedDataParallel) -> str:
    try:
        gradwire.HookState(model)
    except ValueError as error:
        return str(error)
    return ""


def test_each_option_gives_what_it_says(processes: Processes) -> None:
    results = processes(len(NODES), compare_options, nodes=NODES)
    for found in results:
        assert max(found["apart"]) < 0.01 and found["kinds"]  # bfloat16 is summed in another order
        many, few = found["launches"]
        assert few == 3 < many  # delayed: one of each dtype, and the sparse one
        assert found["sums"] == results[0]["sums"]
        assert found["kept"] and found["wrapped"] == 0.0
        assert "skip_all_reduce_unused_params=False" in found["skipping"]
