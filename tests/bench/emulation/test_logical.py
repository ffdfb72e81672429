from gradwire.bench.emulation.logical import python_module, run_logical


def test_ranks_get_torchruns_variables_and_their_nodes_name() -> None:
    script = 'echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $GRADWIRE_HOSTNAME $EXTRA"'
    outcome = run_logical([2, 1], ["sh", "-c", script], environment={"EXTRA": "x"}, timeout_seconds=60)
    assert outcome.output == ("0 0 2 3 node0 x\n", "1 1 2 3 node0 x\n", "2 0 1 3 node1 x\n")


def test_round_robin() -> None:
    outcome = run_logical([2, 1], ["sh", "-c", "echo $GRADWIRE_HOSTNAME"], order="round-robin", timeout_seconds=60)
    assert outcome.output == ("node0\n", "node1\n", "node0\n")


def test_modules_run_under_this_interpreter() -> None:
    outcome = run_logical([1], python_module("gradwire", "--help"), timeout_seconds=120)
    assert outcome.exit_status == 0
    assert "emulate" in outcome.output[0]
