"""What works in a Python that has neither torch nor numpy nor the compiled part: what `uvx gradwire doctor` relies "
"on."""

import json
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradwire.__main__ import main

NEEDED = ("rich", "markdown-it-py", "mdurl", "pygments", "defusedxml", "nvidia-ml-py")
"""What pip installs beside gradwire, but numpy."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gradwire's Python files and what they need, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    for name in NEEDED:
        found = metadata.distribution(name)
        for top in {Path(str(file)).parts[0] for file in found.files or () if ".." not in str(file)}:
            place = Path(str(found.locate_file(top)))
            if place.exists() and top != "__pycache__":
                (folder / top).symlink_to(place)
    own = folder / "gradwire"
    own.mkdir()
    installed = find_spec("gradwire")
    assert installed is not None and installed.origin is not None
    for file in Path(installed.origin).parent.iterdir():
        if not file.name.startswith("_native") and file.name != "__pycache__":
            (own / file.name).symlink_to(file.resolve())
    about = folder / f"gradwire-{metadata.version('gradwire')}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gradwire\nVersion: {metadata.version('gradwire')}\n")
    return folder


def gradwire(packages: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path[:] = [each for each in sys.path if 'site-packages' not in each]; \
sys.path.insert(0, {str(packages)!r}); from gradwire.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200"},
    )


def test_doctor_says_what_one_machine_can_tell_and_what_it_left_out(packages: Path) -> None:
    done = gradwire(packages, "doctor")
    assert done.returncode in (0, 1) and not done.stderr, done
    assert "there is no torch in this Python" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Type: torchrun"), done.stdout
    facts = json.loads(gradwire(packages, "doctor", "--json").stdout)["facts"]["ranks"][0]
    assert "torch" not in facts["versions"] and facts["interfaces"] and facts["shm_nbytes"] > 0


def test_what_needs_torch_says_so(packages: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for words in (("doctor", "--script", script), ("predict", "--gradient-mb", "1"), ("selftest",)):
        done = gradwire(packages, *words)
        assert done.returncode == 1 and "torch" in done.stderr and "Traceback" not in done.stderr, done


def test_topo_and_gdr_check_work(packages: Path) -> None:
    assert "from sysfs" in gradwire(packages, "topo").stdout
    done = gradwire(packages, "gdr-check", "--example")
    assert done.returncode == 0 and "PASS" in done.stdout.upper(), done


CALLERS = ("compressors.kernels.native", "comms.transport.shm", "comms.watch.watch", "comms.outer.fragments")
IMPORTED = """
import importlib, sys, gradwire
sys.modules["gradwire._native"] = None
for caller in sys.argv[1:]:
    try:
        importlib.import_module(f"gradwire.{caller}")
    except ImportError as error:
        print(caller, error)
"""


def test_the_compiled_part_that_is_missing_is_named() -> None:
    """Where torch is there and the wheel is the pure one: training says what to install."""
    words = [sys.executable, "-P", "-c", IMPORTED, *CALLERS]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert tuple(line.split()[0] for line in done.stdout.splitlines()) == CALLERS, done
    for said in done.stdout.splitlines():
        assert "without its compiled part" in said and "`pip install .`" in said, done


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_command_that_needs_the_compiled_part_says_so_before_it_begins(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradwire._native", None)
    monkeypatch.delitem(sys.modules, "gradwire.compressors.compiled", raising=False)
    assert main([command, "--help"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"gradwire {command}: ") and "compiled part" in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_a_free_threaded_python_is_named() -> None:
    """Its own wheels would be named cp314t; of those that there are, pip takes the pure one."""
    script = f'import sysconfig\nsysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1\n{IMPORTED}'
    words = [sys.executable, "-P", "-c", script, *CALLERS]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert tuple(line.split()[0] for line in done.stdout.splitlines()) == CALLERS, done
    ordinary = f"python{sys.version_info.major}.{sys.version_info.minor} without a `t`"
    for said in done.stdout.splitlines():
        assert "free-threaded" in said and ordinary in said and "`pip install .`" not in said, done


def test_a_checkout_that_hides_an_installed_wheel_is_named(tmp_path: Path) -> None:
    """`python -m gradwire` in a checkout imports ./gradwire, whatever is installed."""
    installed, checkout = tmp_path / "site", tmp_path / "checkout"
    (installed / "gradwire").mkdir(parents=True)
    (installed / "gradwire" / "_native.abi3.so").touch()
    about = installed / "gradwire-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gradwire\nVersion: 0.1.0\n")
    (about / "RECORD").write_text("gradwire/_native.abi3.so,,\n")
    for name in ("__init__.py", "compressors/__init__.py", "compressors/compiled.py"):
        found = find_spec("gradwire")
        assert found is not None and found.origin is not None
        copy = checkout / "gradwire" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((Path(found.origin).parent / name).read_text())
    first = [str(checkout), str(installed)]
    script = f"import sys; sys.path[:0] = {first}; import gradwire.compressors.compiled"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert f"{checkout / 'gradwire'}, which has no compiled part, hides" in last and str(installed) in last, done
    assert "PYTHONSAFEPATH=1" in last


def test_a_package_that_is_missing_is_installed_by_the_command_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where gradwire came from a wheel, and there is no checkout for `pip install .`."""

    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'rich', wanted by {name}", name="rich")

    monkeypatch.setattr("gradwire.__main__.importlib.import_module", fail)
    assert main(["topo"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("gradwire topo: `rich` is missing here: pip install '") and "'rich>=13'" in said
    assert "torch" not in said and ";" not in said and said.count("\n") == 1


def test_no_text_installs_gradwire_from_an_index() -> None:
    """There is no release: the command would fail, or install whatever somebody publishes under that name."""
    found = find_spec("gradwire")
    assert found is not None and found.origin is not None
    top = Path(found.origin).parent
    files = [
        each for folder in (top, *(each for each in top.iterdir() if each.is_dir())) for each in folder.rglob("*.py")
    ]
    advice = re.compile(r"pip install[^`\n]*\bgradwire(\[[a-z0-9]+\])?(?! @)[`\s\"'),]|install gradwire\[")
    wrong = sorted(
        {f"{file}: {line.strip()}" for file in files for line in file.read_text().splitlines() if advice.search(line)}
    )
    assert not wrong, wrong
