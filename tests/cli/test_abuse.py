"""What no command may do with nonsense: begin, end in a traceback, or let an escape sequence reach the terminal."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.__main__ import COMMANDS, main
from gradwire.bench.arguments import check_output
from gradwire.bench.doctor import command as doctor
from gradwire.bench.emulation import cluster, fork
from gradwire.bench.nccl_tests import command as bench
from gradwire.bench.terminal import STDOUT, CleanConsole
from gradwire.topology.gdr import capture
from gradwire.topology.printable import printable

EVIL = "\x1b[31mred\x1b]0;title\x07\x9b5m\u202e\udcff"
HUGE, ENDLESS, LONG = str(10**30), "9" * 5000, "x" * 300
PREDICT = "predict --preset dgx_a100 --nodes 2 --gradient-mb 1"
BENCH = "bench all_reduce -b 8 -e 8"
NUMBERS = {
    "compare --megabytes": ("nan", "inf", "0", "1e30"),
    "compare --nodes": ("9999999999", HUGE, ENDLESS, "0"),
    "compare --ranks-per-node": ("9999999999", "0"),
    "compare --uneven": ("99999999999,1", "²", "1," * 300 + "1"),
    "compare --nic": (f"{HUGE}gbit", f"{ENDLESS}gbit", "nan"),
    "compare --stream": (f"{HUGE}gbit",),
    "compare --rounds": (HUGE,),
    "compare --only": ("", "nothing"),
    "compare --interface": ("../..", LONG),
    "doctor --gradient-mb": ("nan", "inf", "0", "1e30"),
    "doctor --step-seconds": ("nan", "-1", "1e300"),
    "doctor --seconds": ("nan", "inf", "4", HUGE),
    "doctor --link": (f"{HUGE}gbit", "nan", ""),
    "doctor --script": (LONG, "folder", f"no{EVIL}"),
    "emulate --nodes": ("9999999999", "0"),
    "emulate --nodes 1 --ranks-per-node": ("9999999999",),
    "emulate --nodes 1 --mtu": ("0", HUGE),
    "emulate --nodes 1 --grace": ("nan", "inf"),
    "emulate --nodes 1 --timeout": ("nan", "-1", "1e300"),
    "bench all_reduce -g": (HUGE, "100000"),
    f"{BENCH} -n": (HUGE,),
    f"{BENCH} -T": (HUGE,),
    f"{BENCH} -r": ("²", HUGE),
    "bench all_reduce -b 1 -e 1000G -i": ("1",),
    "bench all_reduce -b 1 -e": (f"{ENDLESS}G", HUGE),
    "bench all_reduce -b 1G -i 1G -e": ("1000000G",),
    "bench kernels --numel": (HUGE, "0", "1025"),
    "bench kernels --repeats": (HUGE,),
    f"{PREDICT} --nodes": ("9999999999", "0"),
    f"{PREDICT} --ranks-per-node": (HUGE,),
    f"{PREDICT} --nic": (f"{ENDLESS}gbit",),
    f"{PREDICT} --bucket-mb": ("inf", "nan", "0"),
    f"{PREDICT} --backward-ms": ("inf", "nan"),
    "predict --preset dgx_a100 --gradient-mb": ("inf", "nan", "1e300", "0"),
    "predict --preset dgx_a100 --parameters": ("inf", "1e300"),
}
"""Words -> values that the last of them may not have."""
OUTPUTS = {
    "compare --json": "",
    "compare --plot": ".png",
    "doctor --json": "",
    "doctor --svg": "",
    "emulate --nodes 1 --json": "",
    f"{BENCH} -J": ".json",
    f"{BENCH} --csv": ".csv",
    "bench kernels --numel 1024 --json": "",
    f"{PREDICT} --plot": ".png",
    "plot good.json -o": ".png",
    "topo --svg": "",
    "gdr-check --example --capture": "",
}
"""Words -> how the file's name has to end."""
INPUTS = ("compare --replay", "predict --preset p4d --model-json", "predict --gradient-mb 1 --topology", "plot",
          "topo --from", "gdr-check --from", "gdr-check --lspci", "gdr-check --nvlink", "gdr-check --compare",
          "gdr-check --root", "gdr-check --nccl-log", "gdr-check --env")  # fmt: skip
ANY_TEXT = ("gdr-check --nccl-log", "gdr-check --env")
"""Those in which a text that says nothing is nothing wrong."""
LAUNCHERS = (
    {"RANK": "x", "WORLD_SIZE": "2", "MASTER_PORT": "y", "MASTER_ADDR": "z"},
    {"RANK": "0", "WORLD_SIZE": "2"},
    {"RANK": "9", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": "127.0.0.1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999999", "MASTER_ADDR": "127.0.0.1"},
    {"RANK": "0", "WORLD_SIZE": "²", "MASTER_PORT": "1", "MASTER_ADDR": "h"},
    {"RANK": "0", "WORLD_SIZE": ENDLESS, "MASTER_PORT": "1", "MASTER_ADDR": "h"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "MASTER_ADDR": ""},
)


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No node and no rank may start; a folder of bad files to work in."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("something was started before all was checked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster.EmulatedCluster, "_bring_up", begun)
    monkeypatch.setattr(fork, "run_forked", begun)
    monkeypatch.setattr(bench, "fork_ranks", begun)
    for name in ("examine_alone", "_job"):
        monkeypatch.setattr(doctor, name, begun)
    Path("folder").mkdir()
    for suffix in (".png", ".json", ".csv"):
        Path(f"folder{suffix}").mkdir()
    Path("good.json").write_text(json.dumps({"kind": "compare", "results": []}))
    Path("garbage.json").write_text("{no json")
    Path("deep.json").write_text("[" * 100_000)
    Path("wrong.json").write_text(json.dumps({"kind": "compare", "results": None, "blocks": 1}))
    os.mkfifo("fifo.json")


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that it refuses; it ends with 2, in few words, none of which a terminal obeys."""
    try:
        status = main([*words, "--", "true"] if words[0] == "emulate" else words)
    except SystemExit as stop:  # argparse's
        status = int(stop.code or 0)
    out, error = capsys.readouterr()
    assert status == 2, (words, out, error)
    assert error and "Traceback" not in error and printable(out + error) == out + error
    return error


@pytest.mark.parametrize("words", NUMBERS)
def test_a_value_that_cannot_be_is_refused_by_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in NUMBERS[words]:
        error = refused([*words.split(), value], capsys)
        flags = [word.strip("-") for word in words.split() if word.startswith("-")]
        assert any(re.search(rf"[`/ -]{flag}[`:/ ]", error) for flag in flags), error


@pytest.mark.parametrize("words", OUTPUTS)
def test_a_file_that_cannot_be_written_is_named_before_anything_starts(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("missing/x", "folder", LONG, "/proc/x", f"missing{EVIL}/x"):
        if words.startswith(BENCH) and place == "folder":  # there folder.json.0 is written: nothing is overwritten
            continue
        assert place.split("/")[0][:7] in refused([*words.split(), place + OUTPUTS[words]], capsys)
    assert not any("missing" in name or "xxx" in name for name in os.listdir())  # noqa: PTH208 - names alone


@pytest.mark.parametrize("words", INPUTS)
def test_a_file_that_cannot_be_read_is_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"no{EVIL}", LONG, "fifo.json", "garbage.json", "deep.json", "wrong.json", "/dev/zero"]
    for name in names[:3] if words in ANY_TEXT else names:
        assert name[:2] in refused([*words.split(), name], capsys)


@pytest.mark.parametrize(
    ("command", "option"),
    [("topo", "--from"), ("topo --json", "--from"), ("gdr-check", "--from"), ("predict --gradient-mb 9", "--topology")],
)
def test_a_file_without_its_option_gets_it(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = command.split()[0]
    wanted = f"`{option}`: found node.xml without it; wanted `gradwire {name} {option} node.xml`"
    assert wanted in refused([*command.split(), "node.xml"], capsys)
    assert "`--gpu`: found an unknown option" in refused([*command.split(), "--gpu", "H100"], capsys)


@pytest.mark.parametrize("variables", LAUNCHERS, ids=lambda variables: ",".join(variables.values())[:24])
def test_variables_of_no_launcher_are_named(
    variables: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for words in ("gdr-check", "topo", "doctor", BENCH):
        if variables["RANK"] == "0" or words not in (BENCH, "doctor"):  # there other ranks leave it to rank 0
            assert re.search("`(RANK|WORLD_SIZE|MASTER_PORT|MASTER_ADDR)`", refused(words.split(), capsys))


@pytest.mark.parametrize("command", ["", "bench", "bench all_reduce", "bench kernels", "compare", "doctor",
                                     "emulate", "gdr-check", "plot", "predict", "topo"])  # fmt: skip
def test_what_the_user_wrote_is_printed_without_escapes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused([*command.split(), f"--{EVIL}" if command else EVIL], capsys)


def test_printable_text_stays_as_it_is() -> None:
    assert printable("two lines\n\tand `Ünïcödé` ─ ✓") == "two lines\n\tand `Ünïcödé` ─ ✓"
    assert printable(EVIL) == r"\x1b[31mred\x1b]0;title\x07\x9b5m\u202e\udcff"
    console = CleanConsole(force_terminal=True, width=60, color_system="standard")
    with console.capture() as captured:
        console.print(f"[bold]own[/bold] {EVIL[1:]}\x1b[2J")
    assert "\x1b[1mown\x1b[0m" in captured.get() and "\x1b[2J" not in captured.get()


def test_checking_an_output_changes_nothing(tmp_path: Path) -> None:
    kept, fresh = tmp_path / "kept", tmp_path / "fresh"
    kept.write_text("text")
    for path in (kept, fresh, STDOUT, None, Path("fifo.json")):
        check_output("--json", path)
    assert kept.read_text() == "text" and not fresh.exists() and not STDOUT.exists()


def test_an_archive_of_too_many_files_ends_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["gdr-check", "--example", "--json", "--capture", "good.tar.gz"]) in (0, 3)
    monkeypatch.setattr(capture, "_MAX_MEMBERS", 20)
    assert "more than 20 files" in refused(["gdr-check", "--from", "good.tar.gz"], capsys)
    monkeypatch.setattr(capture, "_MAX_MEMBERS", 30_000)
    said: list[str] = []
    effort = capture._Effort(said.append)
    for _ in range(1000):
        effort.one_more()
    assert said == ["unpacking: 500 files", "unpacking: 1000 files"]
    monkeypatch.setattr(capture, "_MAX_SECONDS", -1.0)
    late = capture._Effort(said.append)
    with pytest.raises(capture.CaptureError, match="not unpacked after -1 s and 500 files"):
        for _ in range(500):
            late.one_more()


def test_a_package_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a checkout that nobody has installed."""

    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_installed)
    monkeypatch.setitem(COMMANDS, "topo", ("no_such_package.topo", ""))
    assert main(["topo"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "`no_such_package` is missing" in said and "pip install ." in said
    monkeypatch.setitem(COMMANDS, "topo", ("gradwire.no_such_module", ""))
    with pytest.raises(ModuleNotFoundError):  # a fault of ours stays one
        main(["topo"])


def test_an_interrupt_while_torch_is_loaded_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradwire.__main__.require_torch", interrupted)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # back to what it was
    with pytest.raises(KeyboardInterrupt):
        main(["selftest"])
    assert capsys.readouterr().err == "gradwire: interrupted\n"


STOPPED = """
import atexit, contextlib, os, signal, sys
from gradwire.__main__ import COMMANDS, main
from gradwire.bench.emulation.signals import clean_end

def stopped(words):
    with clean_end() if words else contextlib.nullcontext():
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["stub"], stopped.main = stopped, stopped
COMMANDS["topo"] = ("stub", "")
atexit.register(print, "cleaned up")
sys.exit(main())
"""


@pytest.mark.parametrize("words", [[], ["with a clean end"]])
def test_an_interrupt_ends_a_shells_loop(words: list[str]) -> None:
    """As a shell sees it: only what SIGINT itself has ended, after its exit handlers, ends a script or a loop."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, "topo", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("cleaned up\n", "gradwire: interrupted\n")
