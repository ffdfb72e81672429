import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.bench.emulation.cluster import EmulatedCluster
from gradwire.bench.emulation.launch import python_module
from gradwire.bench.train.train import STEPS_TO_PREDICT, main, predict
from gradwire.comms.autotune.job_advice import JobAdvice, Running, advise_job
from gradwire.comms.step.stepwatch import Observed
from gradwire.topology.cluster import LEVEL_NAMES, Level, Link, uniform_cluster
from support.forked import ForkServer

RANK_OF_TWO_NODES = """
import os, sys
from gradwire.bench.train.train import main

node, local = divmod(int(os.environ["RANK"]), 2)
os.environ |= {"GRADWIRE_HOSTNAME": f"node{node}", "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2"}
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.netns  # whoever else uses this machine's interfaces would be counted
def test_hooks_train_the_same_model_on_the_same_batches(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    words = ["--hook", "plain", "--hook", "torch-fp16", "--hook", "gradwire"]
    words += ["--steps", "4", "--batch", "2", "--context", "32"]
    command = python_module("gradwire.bench.train.train", *words, "--nic-interface", "eth0", "--json", str(file))
    with EmulatedCluster([1, 1]) as cluster:
        outcome = cluster.run(command, timeout_seconds=240)
    outcome.check()
    assert "step    4/4" in outcome.output[0] and "step" not in outcome.output[1]
    assert "bit/s inter_node (probed)" in outcome.output[0]  # nobody gave the link's rate: it was measured
    plain, narrow, exact = json.loads(file.read_text())
    assert [plain["hook"], narrow["hook"], exact["hook"]] == ["plain", "torch-fp16", "gradwire"]
    assert {"none", "fp16", "int8"} <= exact["predicted_seconds"].keys() and narrow["predicted_seconds"] is None
    assert plain["first_loss"] == narrow["first_loss"]
    assert plain["final_loss"] == pytest.approx(narrow["final_loss"], rel=1e-2)
    # An all-reduce over two ranks sends every gradient once, the float16 hook half of that.
    assert plain["gradient_nbytes"] < plain["nic_nbytes_per_step"] < 1.1 * plain["gradient_nbytes"]
    assert 0.48 < narrow["nic_nbytes_per_step"] / plain["nic_nbytes_per_step"] < 0.55
    assert plain["loss_deviation"] > 0
    assert plain["seconds_per_step"] > 0 and plain["validation_bits_per_byte"] > 1


@pytest.mark.parametrize(("plan", "share"), [("flat", 1.0), ("hierarchical", 2 / 3)])
def test_what_a_node_sends_is_counted_in_every_plan(
    plan: str, share: float, tmp_path: Path, ranks_of_scripts: ForkServer
) -> None:
    """Two nodes of two: a ring of all ranks sends 3/2 of the gradient from a node, and a sum inside it first 1."""
    file, script = tmp_path / "results.json", tmp_path / "rank.py"
    script.write_text(RANK_OF_TWO_NODES)
    words = ["--hook", "plain", "--hook", "gradwire", "--steps", "2", "--batch", "1", "--context", "16"]
    done = ranks_of_scripts.run(script, [*words, "--json", str(file)], 4, tmp_path, GRADWIRE_PLAN=plan)
    assert done.statuses == [0] * 4, done.errors
    plain, exact = json.loads(file.read_text())
    assert plain["node_nbytes_per_step"] == 1.5 * plain["gradient_nbytes"]
    assert exact["node_nbytes_per_step"] == pytest.approx(share * plain["node_nbytes_per_step"], rel=1e-3)


def test_predictions_leave_out_the_turns_of_other_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks take turns, so between two backward passes of one hook lie the steps of all others."""
    cluster = uniform_cluster((2, 2), tuple(Level(name, Link(5e-5, 1e8)) for name in LEVEL_NAMES[:2]))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def predicted(step_seconds: float) -> tuple[dict[str, float] | None, float | None]:
        def advise(optimizer: str) -> JobAdvice:
            observed = Observed(step_seconds, backward_seconds=0.5, exposed_seconds=0.25, steps=STEPS_TO_PREDICT)
            return advise_job(cluster, [10**7], observed, optimizer, "gloo", Running("hierarchical", "none"))

        state = SimpleNamespace(config=SimpleNamespace(compressor=None), advise=advise)
        training: Any = SimpleNamespace(state=state, losses=[0.0] * STEPS_TO_PREDICT)
        return predict(training)

    (alone, plain), (in_turns, plain_in_turns) = predicted(1.0), predicted(9.0)
    assert alone and in_turns and plain and plain_in_turns and alone["none"] > 0.5
    assert in_turns["none"] == pytest.approx(alone["none"])
    assert plain_in_turns == pytest.approx(plain)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "`--steps`: found 0"),
        (["--hook", "fastest"], "`--hook`: found 'fastest', wanted one of plain"),
        (["--nic-interface", "nothing0"], "`--nic-interface`: this node has no 'nothing0'"),
    ],
)
def test_options_that_make_no_sense_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
