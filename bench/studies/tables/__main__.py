"""Makes every table of docs/results from its data.

    python -m gradwire.bench.studies.tables           # writes those that the data have changed
    python -m gradwire.bench.studies.tables --check   # names the pages that differ, and ends with 1

The data are CSV files in docs/results/data/PAGE/, the results of trainings in optimizers.jsonl, of injected faults in
watch.jsonl, and what `gradwire predict` says now of the plans on GPUs and of public models.
"""

import sys
from pathlib import Path

from gradwire.bench.studies.shared.parser import StudyParser
from gradwire.bench.studies.tables.made import MADE
from gradwire.bench.studies.tables.page import files_of, with_tables

RESULTS = Path("docs/results")


def pages(folder: Path) -> dict[Path, str]:
    """Returns every page of a folder with tables made from the data: file -> its text.

    Args:
        folder: docs/results of a checkout.

    Raises:
        ValueError: A page or a file cannot be read, or a file belongs to no page.
    """
    found = {}
    for file in sorted(folder.glob("*.md")):
        text, data = file.read_text(encoding="utf-8"), folder / "data" / file.stem
        try:
            found[file] = with_tables(text, data)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        unused = {each.name for each in data.glob("*.csv")} - files_of(text)
        if unused:
            raise ValueError(f"{data / min(unused)} has no place in {file}: `<!-- data: {min(unused)} -->`")
        if file.stem in MADE:
            found[file] = MADE[file.stem](found[file], folder / "data")
    return found


def main(argv: list[str]) -> int:
    """Writes the pages, or with `--check` compares them; returns 0, 1 for a difference, 2 for an unreadable file."""
    parser = StudyParser("tables", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page differs from its data")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help=f"default: {RESULTS}")
    options = parser.parse_args(argv)
    try:
        made = pages(options.results)
    except ValueError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    if not made:
        print(f"tables: `--results` {options.results} has no pages; run it in a checkout", file=sys.stderr)
        return 2
    changed = [file for file, text in made.items() if file.read_text(encoding="utf-8") != text]
    for file in changed:
        print(f"{file} {'differs from its data' if options.check else 'written'}")
        if not options.check:
            file.write_text(made[file], encoding="utf-8")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
