"""The scripts: where each is, how it is run, and what of it asks for a GPU."""

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from real_scripts import data
from real_scripts.sources import Change, apply, take_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script that others wrote.

    Attributes:
        name: Of ours, for the table.
        repository: `karpathy/nanoGPT`, on GitHub.
        commit: The one that was tried.
        paths: What of the repository is needed; the first is the folder where the command runs.
        command: Behind the interpreter.
        killed_after: The optimizer step behind which the first run is killed; 0: it comes to its end.
        resume: Added to the command to go on from what a killed run has saved; None where it saves nothing.
        needs: Modules that it imports, beside torch and numpy.
        data: Makes the data set that the script would download.
        variables: Of the environment.
        hooked: Whether it has a DistributedDataParallel; where not, GRADWIRE_HOOK changes nothing and says so.
        sharded: Whether each rank has other parameters.
        compresses: Whether it has a parameter that is worth compressing.
        on_cpu: What asks for a GPU; changed in the copy on machines without two.
    """

    name: str
    repository: str
    commit: str
    paths: tuple[str, ...] = (".",)
    command: tuple[str, ...]
    killed_after: int = 0
    resume: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    data: Callable[[Path], None] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    hooked: bool = True
    sharded: bool = False
    compresses: bool = True
    on_cpu: tuple[Change, ...] = ()

    def lacks(self) -> list[str]:
        """Modules that this environment does not have."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]

    def prepare(self, sources: Path, into: Path, on_cpu: bool) -> Path:
        """The folder where the command runs, with the script and its data."""
        take_out(self.repository, self.commit, self.paths, sources, into)
        folder = into / self.paths[0]
        if on_cpu:
            apply(self.on_cpu, folder)
        if self.data is not None:
            self.data(folder)
        return folder

    def copy(self, prepared: Path, into: Path) -> Path:
        """A folder for one run."""
        shutil.rmtree(into, ignore_errors=True)
        return Path(shutil.copytree(prepared, into))


NANOGPT = Script(
    name="nanoGPT",
    repository="karpathy/nanoGPT",
    commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    paths=(".", "train.py", "model.py", "configurator.py", "config"),
    data=data.nanogpt_characters,
    command=(
        "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--backend=gloo",
        "--dtype=float32", "--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=32", "--batch_size=4",
        "--gradient_accumulation_steps=4", "--eval_interval=3", "--eval_iters=1", "--log_interval=1", "--max_iters=8",
        "--always_save_checkpoint=True",
    ),
    killed_after=5,
    resume=("--init_from=resume",),
    on_cpu=(
        Change("train.py", "device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
        Change("train.py", "torch.cuda.set_device(device)", "pass"),
        Change("train.py", "DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
    ),
)  # fmt: skip

PYTORCH_EXAMPLES = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
TWO_GPUS = ("return has_gpu and gpu_count >= min_gpus", "return True")

DDP_EXAMPLE = Script(
    name="pytorch/examples: distributed/ddp",
    repository="pytorch/examples",
    commit=PYTORCH_EXAMPLES,
    paths=("distributed/ddp",),
    command=("example.py",),
    compresses=False,  # 165 parameters
    on_cpu=(
        Change("example.py", *TWO_GPUS),
        Change("example.py", "get_default_backend_for_device(acc)", "get_default_backend_for_device('cpu')"),
        Change("example.py", "torch.accelerator.set_device_index(rank)", "pass"),
        Change("example.py", "ToyModel().to(rank)", "ToyModel()"),
        Change("example.py", "DDP(model, device_ids=[rank])", "DDP(model)"),
        Change("example.py", "torch.randn(20, 5).to(rank)", "torch.randn(20, 5)"),
    ),
)

MINGPT = Script(
    name="pytorch/examples: distributed/minGPT-ddp",
    repository="pytorch/examples",
    commit=PYTORCH_EXAMPLES,
    paths=("distributed/minGPT-ddp",),
    needs=("hydra", "omegaconf", "boto3", "fsspec"),
    data=data.mingpt_text,
    command=(
        "mingpt/main.py", "data_config.path=data/input.txt", "data_config.block_size=16", "data_config.truncate=1.0",
        "gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=64", "trainer_config.max_epochs=2",
        "trainer_config.batch_size=200", "trainer_config.data_loader_workers=0", "trainer_config.save_every=1",
        "trainer_config.use_amp=False",
    ),
    killed_after=8,
    resume=(),
    on_cpu=(
        Change("mingpt/main.py", *TWO_GPUS),
        Change("mingpt/main.py", "acc = torch.accelerator.current_accelerator()", "acc = 'cpu'"),
        Change("mingpt/main.py", "torch.accelerator.set_device_index(rank)", "pass"),
        Change("mingpt/trainer.py", "self.acc = torch.accelerator.current_accelerator()", "self.acc = 'cpu'"),
        Change("mingpt/trainer.py", "model.to(self.local_rank)", "model"),
        Change("mingpt/trainer.py", "DDP(self.model, device_ids=[self.local_rank])", "DDP(self.model)"),
        Change("mingpt/trainer.py", "source.to(self.local_rank)", "source"),
        Change("mingpt/trainer.py", "targets.to(self.local_rank)", "targets"),
    ),
)  # fmt: skip

LIGHTNING_EXAMPLES = "7f0c3436cd3f6ad3753125672024fc415cbcb414"

FABRIC = Script(
    name="Lightning: Fabric's language_model",
    repository="Lightning-AI/pytorch-lightning",
    commit=LIGHTNING_EXAMPLES,
    paths=("examples/fabric/language_model",),
    needs=("lightning", "requests"),
    data=data.wikitext,
    command=("train.py",),
    # What `fabric run --accelerator cpu --strategy ddp --devices 2` sets.
    variables={
        "LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_STRATEGY": "ddp", "LT_DEVICES": "2", "LT_NUM_NODES": "1",
    },
    killed_after=4,
)  # fmt: skip

SCRIPTS = (NANOGPT, DDP_EXAMPLE, MINGPT, FABRIC)
