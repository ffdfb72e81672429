from pathlib import Path

import pytest
import torch

from gradwire.bench.train.text import BLOCK_NBYTES, VALIDATION_EVERY, batch_at, library_files, library_text, split_text


def test_the_library_is_real_text_and_always_the_same() -> None:
    text = library_text()
    assert text.dtype == torch.uint8 and text.dim() == 1
    assert text.numel() > 4_000_000
    assert torch.equal(text, library_text())
    files = library_files()
    assert any(file.name == "argparse.py" for file in files)
    assert not any("site-packages" in file.parts for file in files)


def test_files_come_in_one_order(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "a/site-packages/x.py", "note.txt", "test/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [file.relative_to(tmp_path).as_posix() for file in library_files(tmp_path)] == ["a.py", "a/z.py", "b.py"]


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass")
    with pytest.raises(ValueError, match=r"`folder`: found 4 bytes"):
        library_text(tmp_path)


def test_a_split_loses_and_doubles_nothing() -> None:
    blocks = 2 * VALIDATION_EVERY + 3
    text = torch.arange(blocks).repeat_interleave(BLOCK_NBYTES).to(torch.uint8)[:-5]
    training, validation = split_text(text)
    assert training.numel() + validation.numel() == text.numel()
    assert sorted(set(validation.tolist())) == [VALIDATION_EVERY - 1, 2 * VALIDATION_EVERY - 1]
    assert not set(training.tolist()) & set(validation.tolist())


def test_a_batch_depends_on_step_and_rank_alone() -> None:
    text = torch.arange(1000).remainder(251).to(torch.uint8)
    inputs, targets = batch_at(text, 3, 1, batch=4, context=16)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 251, targets)
    assert torch.equal(inputs, batch_at(text, 3, 1, batch=4, context=16)[0])
    assert not torch.equal(inputs, batch_at(text, 4, 1, batch=4, context=16)[0])
    assert not torch.equal(inputs, batch_at(text, 3, 0, batch=4, context=16)[0])


def test_the_last_byte_can_be_a_target() -> None:
    text = torch.arange(18, dtype=torch.uint8)
    seen = {int(batch_at(text, step, 0, batch=1, context=16)[1][0, -1]) for step in range(40)}
    assert seen == {16, 17}
