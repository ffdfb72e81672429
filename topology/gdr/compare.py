"""Hosts of one job side by side: which one is the odd one out, and in what."""

from collections import Counter
from collections.abc import Mapping, Sequence

from gradwire.topology.printable import shortened


def differences(results: Sequence[Mapping[str, object]]) -> list[str]:
    """Compares the results of several hosts; returns a line for every check, verdict and version on which they differ.

    A line names the minority and its values; if there is no majority, each value and its hosts. If only some of the
    hosts have nothing to check, the lines name these hosts instead.

    Args:
        results: The `--json` output of each host; anything of another shape counts as a host without results.
    """
    names = _names(results)
    found = [
        f"hardware: {name} has nothing to check: {result['nothing']}"
        for name, result in zip(names, results, strict=True)
        if result.get("nothing")
    ]
    if 0 < len(found) < len(results):
        return found
    tables = [_table(result) for result in results]
    found = []
    for key in sorted({key for table in tables for key in table}):
        values = [table.get(key, "missing") for table in tables]
        counts = Counter(values)
        if len(counts) < 2:
            continue
        usual, count = counts.most_common(1)[0]
        if count * 2 > len(values):
            odd = [f"{name} has {value}" for name, value in zip(names, values, strict=True) if value != usual]
            found.append(f"{key}: {', '.join(odd[:8])}, {count} hosts have {usual}")
        else:
            groups = [
                f"{value} on {', '.join(n for n, v in zip(names, values, strict=True) if v == value)}"
                for value in counts
            ]
            found.append(f"{key}: {'; '.join(groups[:8])}")
    return found


def _names(results: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns a name for each result: its `name`, else `host` and its index; repeated names get the index too."""
    names = [shortened(str(result.get("name") or f"host {index}"), 80) for index, result in enumerate(results)]
    return [name if names.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(names)]


def _table(result: Mapping[str, object]) -> dict[str, str]:
    """Returns what has to agree between hosts, title -> value: outcomes of the checks, verdicts and versions."""
    table: dict[str, str] = {}
    checks = result.get("checks")
    for check in checks if isinstance(checks, list) else ():
        if isinstance(check, dict) and check.get("id") != "U5":
            table[str(check.get("id"))[:8]] = str(check.get("outcome"))[:16]
    for group in ("verdicts", "versions"):
        values = result.get(group)
        for name, value in values.items() if isinstance(values, dict) else ():
            table[f"{group[:-1]} {name}"] = shortened(str(value), 80)
    return table
