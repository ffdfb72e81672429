"""The scripts: where each is, how it is run, and what of it asks for a GPU."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from real_scripts import data
from real_scripts.sources import Change, apply, take_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script that others wrote.

    Attributes:
        name: Of ours, for the table.
        repository: `karpathy/nanoGPT`, on GitHub; empty: the command runs a module of an installed package.
        commit: The one that was tried.
        paths: What of the repository is needed; the first is the folder where the command runs.
        command: Behind the interpreter.
        killed_after: The optimizer step behind which the first run is killed; 0: it comes to its end.
        resume: Added to the command to go on from what a killed run has saved; None where it saves nothing.
        needs: Modules that it imports, beside torch and numpy.
        data: Makes the data set that the script would download.
        variables: Of the environment.
        starts_ranks: Whether the command starts the ranks itself; else each rank is one process of it.
        hooked: Whether it has a DistributedDataParallel; where not, GRADWIRE_HOOK changes nothing and says so.
        sharded: Whether each rank has other parameters.
        compresses: Whether it has a parameter that is worth compressing.
        settings: What users set in the file, where it has no options for it; changed in the copy.
        on_cpu: What asks for a GPU; changed in the copy on machines without two.
    """

    name: str
    repository: str = ""
    commit: str = ""
    paths: tuple[str, ...] = (".",)
    command: tuple[str, ...]
    killed_after: int = 0
    resume: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    data: Callable[[Path], None] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    starts_ranks: bool = False
    hooked: bool = True
    sharded: bool = False
    compresses: bool = True
    settings: tuple[Change, ...] = ()
    on_cpu: tuple[Change, ...] = ()

    def lacks(self) -> str:
        """Why this environment cannot run it: modules that are not there, or cannot be imported; empty where it can."""
        if missing := [module for module in self.needs if importlib.util.find_spec(module) is None]:
            return f"this environment lacks {', '.join(missing)}"
        for module in self.needs:
            done = subprocess.run(
                [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                return f"`import {module}` fails here: {done.stderr.strip().splitlines()[-1]}"
        return ""

    def prepare(self, sources: Path, into: Path, on_cpu: bool) -> Path:
        """The folder where the command runs, with the script and its data."""
        folder = into / self.paths[0]
        if self.repository:
            take_out(self.repository, self.commit, self.paths, sources, into)
        else:
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir(parents=True)
        apply((*self.settings, *(self.on_cpu if on_cpu else ())), folder)
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

TRAINER = Script(
    name="Lightning: the Trainer's transformer",
    repository="Lightning-AI/pytorch-lightning",
    commit=LIGHTNING_EXAMPLES,
    paths=("examples/pytorch/basics",),
    needs=("lightning", "requests"),
    data=data.wikitext,
    command=("transformer.py",),
    killed_after=4,
    # On GPUs it takes all that are there.
    on_cpu=(Change("transformer.py", "L.Trainer(", "L.Trainer(accelerator='cpu', strategy='ddp', devices=2, "),),
)

FSDP2_EXAMPLE = Script(
    name="pytorch/examples: distributed/FSDP2",
    repository="pytorch/examples",
    commit=PYTORCH_EXAMPLES,
    paths=("distributed/FSDP2",),
    command=("example.py",),
    resume=(),  # it saves at its end
    # Its layers are moved from meta and never initialized: without this they are what the memory holds, NaN perhaps.
    # glibc gives bytes of 255 ^ MALLOC_PERTURB_.
    variables={"MALLOC_PERTURB_": "255"},
    hooked=False,
    sharded=True,
    on_cpu=(Change("example.py", *TWO_GPUS), Change("example.py", ", device_id=device", "")),
)

CELEBA = 'CelebA(\n        root=dataroot,\n        split="all",\n        download=True,'

GAN = Script(
    name="Lightning: Fabric's DCGAN",  # two models
    repository="Lightning-AI/pytorch-lightning",
    commit=LIGHTNING_EXAMPLES,
    paths=("examples/fabric/dcgan",),
    needs=("lightning", "torchvision"),
    command=("train_fabric.py",),
    killed_after=6,
    settings=(
        Change("train_fabric.py", "datasets import CelebA", "datasets import FakeData"),  # CelebA has a checksum
        Change("train_fabric.py", CELEBA, "FakeData("),
        Change("train_fabric.py", "batch_size = 128", "batch_size = 16"),
        Change("train_fabric.py", "ngf = 64", "ngf = 16"),
        Change("train_fabric.py", "ndf = 64", "ndf = 16"),
        Change("train_fabric.py", "workers = os.cpu_count()", "workers = 0"),
        Change("train_fabric.py", 'Fabric(accelerator="auto", devices=1)', 'Fabric(accelerator="auto", devices=2)'),
    ),
    on_cpu=(Change("train_fabric.py", 'accelerator="auto"', 'accelerator="cpu", strategy="ddp"'),),
)

TIMM = Script(
    name="timm: train.py",
    repository="huggingface/pytorch-image-models",
    commit="aa4b5850c1543fa488abf260f18390eda46cf85d",
    paths=(".", "train.py", "timm"),
    needs=("torchvision", "PIL", "yaml", "huggingface_hub", "safetensors"),
    data=data.image_folders,
    command=(
        "train.py", "--data-dir=data", "--model=test_resnet", "--num-classes=2", "--input-size", "3", "32", "32",
        "--batch-size=4", "--epochs=2", "--warmup-epochs=0", "--workers=1", "--no-prefetcher",
        "--output=out", "--experiment=run",
    ),
    killed_after=6,
    resume=("--resume=out/run/last.pth.tar",),
    on_cpu=(
        Change("train.py", "'--device', default='cuda'", "'--device', default='cpu'"),
        Change("train.py", "device_ids=[device]", "device_ids=None"),
    ),
)  # fmt: skip

RUN_CLM = Script(
    name="Transformers: run_clm",
    repository="huggingface/transformers",
    commit="3a275d3581c0ecf962f7412aa764c2047331fd6b",
    paths=("examples/pytorch/language-modeling",),
    needs=("transformers", "datasets", "evaluate"),
    data=data.words_and_tokenizer,
    command=(
        "run_clm.py", "--model_type=gpt2", "--tokenizer_name=tokenizer", "--train_file=train.txt", "--do_train",
        "--config_overrides=n_embd=64,n_layer=2,n_head=2,n_positions=32,vocab_size=32", "--block_size=32",
        "--per_device_train_batch_size=4", "--max_steps=8", "--save_steps=3", "--logging_steps=1", "--output_dir=out",
        "--cache_dir=cache", "--report_to=none", "--seed=1",
    ),
    variables={"HF_HUB_OFFLINE": "1"},
    killed_after=5,
    resume=("--resume_from_checkpoint=out/checkpoint-3",),
    on_cpu=(
        Change(
            "run_clm.py", "parse_args_into_dataclasses()",
            "parse_args_into_dataclasses([*sys.argv[1:], '--use_cpu', '--ddp_backend=gloo'])",
        ),
    ),
)  # fmt: skip

IMAGENET = Script(
    name="pytorch/examples: imagenet --dummy",
    repository="pytorch/examples",
    commit=PYTORCH_EXAMPLES,
    paths=("imagenet",),
    needs=("torchvision",),
    command=(
        "main.py", "--arch=resnet18", "--dummy", "--dist-url=env://", "--dist-backend=gloo", "--batch-size=2",
        "--workers=0", "--print-freq=1",
    ),
    killed_after=3,
    on_cpu=(
        Change(
            "main.py", "        print('using CPU, this will be slow')",
            "        model = torch.nn.parallel.DistributedDataParallel(model)",
        ),
    ),
)  # fmt: skip

RAY = Script(
    name="Ray Train: torch_linear_example",
    needs=("ray", "pandas"),
    command=("-m", "ray.train.examples.pytorch.torch_linear_example", "--smoke-test"),
    starts_ranks=True,
    variables={"RAY_raylet_start_wait_time_s": "300"},  # on a machine with other work to do
    compresses=False,  # 2 parameters
)

DION = Script(
    name="microsoft/dion: train.py",
    repository="microsoft/dion",
    commit="0a059a4542e5aa74b40dcd1dce363836c7afcd48",
    paths=(".", "train.py", "models", "dion"),
    needs=("wandb", "yaml", "tqdm"),
    data=data.fineweb,
    command=(
        "train.py", "--config=tiny.yaml", "--optimizer=dion", "--scalar_opt=adamw", "--no_wandb", "--no_compile",
        "--no_triton", "--checkpoint_dir=checkpoints", "--checkpoint_freq=3",
    ),
    variables={"TORCHDYNAMO_DISABLE": "1"},
    killed_after=5,
    resume=(),
    on_cpu=(
        Change("train.py", 'assert torch.cuda.is_available(), "CUDA must be available"', "pass"),
        Change("train.py", 'dist.init_process_group(backend="nccl")', 'dist.init_process_group(backend="gloo")'),
        Change("train.py", "torch.cuda.set_device(device)", "pass"),
        Change("train.py", 'model.to_empty(device="cuda")', 'model.to_empty(device="cpu")'),
        Change("train.py", "DDP(model, device_ids=[local_rank], output_device=local_rank)", "DDP(model)"),
        Change("train.py", "torch.cuda.synchronize()", "pass"),
        Change("train.py", 'torch.amp.autocast(device_type="cuda"', 'torch.amp.autocast(device_type="cpu"'),
        Change("models/gpt_utils.py", "x.cuda(), y.cuda()", "x, y"),
    ),
)  # fmt: skip

MUON = replace(
    DION,
    name="microsoft/dion: train.py, Muon",
    command=tuple(word.replace("--optimizer=dion", "--optimizer=muon") for word in DION.command),
)

SCRIPTS = (NANOGPT, DDP_EXAMPLE, MINGPT, IMAGENET, FSDP2_EXAMPLE, FABRIC, TRAINER, GAN, TIMM, RUN_CLM, RAY, DION, MUON)
