"""The notebook in examples/ runs as it stands, on the CPU where there are no GPUs, and is committed without outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "two_gpus.ipynb"
SMALL = {"STEPS": 12, "WIDTH": 128, "SELFTEST": ["--device", "cpu", "--numel", "1", "--ranks", "1"]}
"""In place of what the cell tagged `parameters` says."""


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def test_it_is_committed_without_outputs() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells()}) == len(cells())
    assert [cell["metadata"].get("tags", []) for cell in code].count(["parameters"]) == 1


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cell for cell in cells() if cell["cell_type"] == "code"):
        source = compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec")
        exec(source, namespace)  # noqa: S102 - it is ours
        if "parameters" in cell["metadata"].get("tags", []):
            assert namespace.keys() >= SMALL.keys(), "the parameters have other names"
            namespace |= SMALL
    output = capfd.readouterr().out
    assert "nothing failed" in output
    assert json.loads(Path("selftest.json").read_text())["exit_status"] == 0
    table = [line.split() for line in output.splitlines()[-3:]]
    assert [row[0] for row in table] == ["plain", "exact", "int8"]
    for row in table:
        assert float(row[1]) > 0
        assert float(row[3]) < float(row[2]), "nothing was learned"
    assert table[1][2:4] == table[0][2:4], "exact"
