"""What users install: sdist and wheel from clean environments, used without a compiler.

`make wheel` runs it. pip fetches what builds and what gradwire depends on; torch is this environment's.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from gradwire.bench.emulation.launch import held_port
from gradwire.bench.emulation.namespaces import available

pytestmark = [pytest.mark.wheel, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ("test_public_names.py", "test_examples.py", "test_docs.py", "cli", "adapters")
"""Of tests/, what tries what users meet: it runs against the wheel, too, in a folder without gradwire's sources."""
REPOSITORY = "https://forge.example/owner/gradwire"
COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|cpp|clang|clang\+\+|ld|nvcc|cmake|ninja|make|rustc)(-[\d.]+)?$")

TRAINING = """
import re, sys
import torch

def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 32)

def train(model):
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()

text = open(sys.argv[1], encoding="utf-8").read()
exec(re.search("```python\\n(.*?)```", text, re.DOTALL)[1])
dist.barrier()
"""

IMPORT_ALL = """
import importlib, sys
from pathlib import Path

packages = Path(sys.argv[1])
count = 0
for path in sorted((packages / "gradwire").rglob("*.py")):
    parts = path.relative_to(packages).with_suffix("").parts
    if parts[-1] == "__main__" or parts[:3] == ("gradwire", "bench", "studies"):
        continue  # the studies say that they are not there: see below
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "gradwire":
            raise  # a framework may be missing, a part of gradwire may not
    else:
        assert Path(module.__file__) == path, (module.__file__, path)
        count += 1
print(count)
"""


def run(*command: str | Path, **variables: str) -> str:
    """Runs a command and returns what it printed, both streams."""
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=variables or None,
        cwd="/",  # not the checkout: Python would import its gradwire/
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it: each in an environment of its own."""
    folder = tmp_path_factory.mktemp("built")
    venv.create(folder / "builder", with_pip=True)
    python = folder / "builder" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", folder / "dist", ROOT, **os.environ | {"GRADWIRE_REPOSITORY": REPOSITORY})
    return folder / "dist"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the machine's programs but compilers."""
    folder = tmp_path_factory.mktemp("tools")
    for place in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not COMPILERS.match(program.name) and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    assert shutil.which("c++", path=str(folder)) is None and shutil.which("cc", path=str(folder)) is None
    return folder


class Installed:
    """An environment with the wheel and its dependencies, torch aside.

    Args:
        folder: For the environment.
        wheel: To install.
        tools: Programs on its PATH.
    """

    def __init__(self, folder: Path, wheel: Path, tools: Path) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self.path = f"{self.bin}:{tools}"
        [self.packages] = (folder / "lib").glob("python*/site-packages")
        run(self.bin / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheel, PATH=self.path)

    def run(self, program: str, *arguments: str | Path) -> str:
        """Runs a program of the environment; see `run`."""
        return run(self.bin / program, *arguments, PATH=self.path, OMP_NUM_THREADS="1")

    def fails(self, program: str, *arguments: str) -> tuple[int, str]:
        """Status and output of a program of the environment."""
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env={"PATH": self.path})
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def bare(built: Path, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Without torch."""
    [wheel] = built.glob("*.whl")
    return Installed(tmp_path_factory.mktemp("bare"), wheel, tools)


@pytest.fixture
def complete(bare: Installed) -> Iterator[Installed]:
    """With this environment's torch behind its own packages, and no .pth file of it, until the test ends."""
    line = bare.packages / "torch.pth"
    line.write_text(f"{Path(torch.__file__).parents[1]}\n")
    yield bare
    line.unlink()


def metadata(built: Path) -> Message:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_what_users_need_and_no_more(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("gradwire/") for name in names)
    assert len([name for name in names if name.endswith(".so")]) == 1
    kinds = {name.rpartition(".")[2] for name in names}
    assert kinds == {"py", "pyi", "so", "typed", "cu", "cuh", "h"}, kinds
    assert not [name for name in names if "/csrc/cpu/" in name or "test" in Path(name).stem]
    assert [name for name in names if "/studies/" in name] == ["gradwire/bench/studies/__init__.py"]
    tags = wheel.name.split("-")
    assert tags[-2:-1] == ["abi3"] if sys.version_info >= (3, 12) else tags[-3:-1] == ["cp311", "cp311"]


def test_a_study_that_is_started_says_that_it_is_not_in_the_wheel(complete: Installed) -> None:
    status, said = complete.fails("python", "-m", "gradwire.bench.studies.convergence.alone", "--task", "text")
    assert status == 1 and "gradwire's studies are not in a wheel: `pip install -e .`" in said
    status, said = complete.fails("gradwire", "selftest", "--hour", "--json", "hour.json")
    assert status == 2 and "there is no checkout" in said and "`pip install -e . pytest hypothesis`" in said


def test_the_wheel_holds_all_that_the_checkout_shows(built: Path) -> None:
    walk = os.walk(ROOT / "gradwire", followlinks=True)
    shown = {Path(folder, name).relative_to(ROOT) for folder, _, names in walk for name in names}
    shown = {path for path in shown if path.suffix not in {".so", ".pyc"}}
    at_build_time = {path for path in shown if path.suffix == ".cpp" or path.is_relative_to("gradwire/csrc/cpu")}
    of_a_checkout = {path for path in shown if path.is_relative_to("gradwire/bench/studies")}
    of_a_checkout.remove(Path("gradwire/bench/studies/__init__.py"))
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {Path(name) for name in archive.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
    assert held == shown - at_build_time - of_a_checkout
    assert {Path("gradwire/fsdp.py"), Path("gradwire/comms/hook.py")} <= held


def test_every_module_of_the_wheel_can_be_imported(complete: Installed, tmp_path: Path) -> None:
    script = tmp_path / "import_all.py"
    script.write_text(IMPORT_ALL)
    assert int(complete.run("python", script, complete.packages)) > 100


def test_the_sdist_has_no_pictures_and_no_links(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = [member.name.partition("/")[2] for member in members]
    assert not [name for name in names if name.endswith((".png", ".svg", ".so"))]
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert {"LICENSE", "README.md", "CMakeLists.txt", "docs/index_page.py", "gradwire/comms/hook.py"} <= set(names)
    assert "comms/hook.py" not in names


def test_the_index_page_links_to_the_repository(built: Path) -> None:
    found = metadata(built)
    page = str(found.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and not [link for link in links if not link.startswith("https://")]
    commit = re.search(r"\+g([0-9a-f]+)", found["Version"])
    shown = commit[1] if commit else f"v{found['Version']}"
    assert f"{REPOSITORY}/raw/{shown}/docs/pictures/training.png" in links
    assert f"Source, {REPOSITORY}" in (found.get_all("Project-URL") or [])
    assert not [each for each in found.get_all("Requires-Dist") or [] if re.match(r"torch\b", each)]


def test_without_torch_it_says_what_to_install(bare: Installed) -> None:
    assert "gradwire COMMAND" in bare.run("gradwire", "--help")
    bare.run("gradwire", "topo")
    bare.run("gradwire", "emulate", "--help")
    wanted = "gradwire needs torch 2.13 or newer: pip install torch"
    for command in ("predict", "bench", "compare"):
        status, output = bare.fails("gradwire", command)
        assert status == 1 and wanted in output and "Traceback" not in output
    status, output = bare.fails("python", "-c", "import gradwire; gradwire.HookState")
    assert status == 1 and output.rstrip().splitlines()[-1].startswith(f"ModuleNotFoundError: {wanted}")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """All of the checkout but what is installed: tests, docs, examples, and what lies beside them.

    The machines of `shared/`, where there are some beside the checkout, are beside it, too.
    """
    target = tmp_path / "checkout"
    target.mkdir()
    if (ROOT.parent / "shared").exists():
        (tmp_path / "shared").symlink_to(ROOT.parent / "shared")
    installed = {path.resolve().name for path in (ROOT / "gradwire").iterdir() if path.is_symlink()} | {"gradwire"}
    made = {".git", ".venv", "build", "dist"}
    for path in ROOT.iterdir():
        if path.name in installed | made or path.name.endswith("_cache"):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target / path.name)
    return target


def test_the_suite_of_what_users_meet_passes_against_the_wheel(complete: Installed, elsewhere: Path) -> None:
    names = [elsewhere / "tests" / name for name in PUBLIC]
    output = complete.run(
        "python", "-m", "pytest", "--rootdir", elsewhere, "-c", elsewhere / "pyproject.toml", "-p", "no:cacheprovider",
        "-q", "-n", "2", "--dist", "loadfile", *names,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) > 200, output


def test_the_main_job_runs_from_the_wheel(complete: Installed, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    words = ("--logical", "--nic", "100mbit", "--steps", "4", "--batch", "2", "--json", str(file))
    output = complete.run("python", "-m", "gradwire.bench.train.main_job", *words)
    assert output.startswith("No gain in seconds can be shown"), output
    assert [one["hook"] for one in json.loads(file.read_text())["results"]] == ["plain", "gradwire", "gradwire:int8"]


def test_the_two_lines_of_the_readme_train(complete: Installed, tmp_path: Path) -> None:
    where = complete.run("python", "-c", "import gradwire; print(gradwire.__file__)").strip()
    assert Path(where).is_relative_to(complete.packages)
    (tmp_path / "train.py").write_text(TRAINING)
    with held_port() as port:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
        output = complete.run("python", *torchrun, tmp_path / "train.py", ROOT / "README.md")
    assert "2 ranks on 1 node" in output or "flat" in output, output


def test_emulate_runs_them_on_a_cluster(complete: Installed, tmp_path: Path) -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(TRAINING)
    command = ("emulate", "--nodes", "2", "--nic", "1gbit", "--", "python", str(tmp_path / "train.py"))
    output = complete.run("gradwire", *command, ROOT / "README.md")
    assert "node0" in output and "bytes on the links" in output


def test_the_pure_wheel_looks_at_one_machine_without_torch_and_without_a_compiler(
    built: Path, tools: Path, tmp_path: Path
) -> None:
    """What `uvx gradwire doctor` takes where no other wheel fits: every Python, every machine."""
    python = built.parent / "builder" / "bin" / "python"
    run(python, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, **os.environ | {"GRADWIRE_PURE": "1"})
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    installed = Installed(tmp_path / "environment", wheel, tools)
    assert not list(installed.packages.glob("torch*")) and not list(installed.packages.rglob("_native*.so"))
    said = installed.run("gradwire", "doctor")
    assert "there is no torch in this Python" in said and "Type: " in said, said
    assert "from sysfs" in installed.run("gradwire", "topo")
