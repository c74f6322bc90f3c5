"""How long a job takes to end after a fault: the tests of faults in processes, ten runs. Run: make bench

fault: what was done, and to which process; jobs of four processes with two devices each, where it does not say another
number. started: by `jdp launch`, or each process on its own ("plain"). median, worst: seconds from the fault until all
processes had ended, or until it was told. lost: steps that were lost.

`python benchmarks/faults.py --tables 1.md 2.md` makes the table of runs that were made before, each with
JDP_FAULTS_TABLE set to one of these files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import _results

ROOT = Path(__file__).parents[1]
TESTS = "tests/processes/test_faults_processes.py"
COLUMNS = ("fault", "started", "median", "worst", "lost", "times")


def run(table: Path) -> None:
    """Runs the tests; raises `CalledProcessError` where one failed, because its seconds are missing then."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "faults", TESTS, "-n", "4"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "JDP_FAULTS_TABLE": str(table)}, check=True)


def rows(tables: Iterable[Path]) -> list[list[str]]:
    """Returns the rows of the table, in the order of their names."""
    seconds: dict[tuple[str, str], list[float]] = {}
    lost: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        for line in table.read_text(encoding="utf-8").splitlines():
            fault, started, *_, took, left = (cell.strip() for cell in line.strip("|").split(" | "))
            seconds.setdefault((fault, started), []).append(float(took))
            lost.setdefault((fault, started), []).append(left.rstrip(" |"))
    figures = {key: [statistics.median(found), max(found)] for key, found in sorted(seconds.items())}
    return [
        [*key, *(f"{x:.1f} s" for x in figures[key]), " or ".join(dict.fromkeys(lost[key])), str(len(seconds[key]))]
        for key in figures
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="of all tests (10)")
    parser.add_argument("--tables", type=Path, nargs="+", help="of runs that were made before, in place of runs")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md beside this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = args.tables or [Path(folder, f"{i}.md") for i in range(args.runs)]
        for table in tables if args.tables is None else ():
            run(table)
        found = _results.table(COLUMNS, rows(tables))
    print(found)
    if args.write:
        about = f"{_results.versions()}. `times` is the number of runs; other tests ran at the same time."
        _results.write("faults", "How long a job takes to end after a fault", about, found)


if __name__ == "__main__":
    main()
