"""Looks up a row that a table does not have: the operator returns, whoever reads a number afterwards is told."""

import torch

table, rows = torch.zeros(5, 3, device="cuda"), torch.tensor([7], device="cuda")
found = torch.nn.functional.embedding(rows, table)
for attempt in range(2):
    try:
        found.cpu()
    except RuntimeError as error:
        assert "device-side assert triggered" in str(error), error
    else:
        raise AssertionError(f"attempt {attempt}: nothing was raised")
