"""What a type checker sees of jdp: `make types` runs this, for pyright and for mypy, on what is installed.

`right.py` has no error. In `wrong.py` the lines with an error are those marked `# wrong`. All that is public has a
type.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

HERE = pathlib.Path(__file__).parent
FILES = ("right.py", "wrong.py")
# optax has types, and does not say so (it lacks py.typed): mypy would take each for anything.
CONFIG = "[mypy]\n[mypy-optax.*,etils.*]\nfollow_untyped_imports = True\n"


def run(tool: str, *arguments: str) -> str:
    """What one of the environment's tools prints, in a folder from which only what is installed can be imported."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            shutil.copy(HERE / name, folder)
        pathlib.Path(folder, "mypy.ini").write_text(CONFIG)
        command = [shutil.which(tool, path=path) or tool, *arguments]
        done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def by_pyright() -> set[tuple[str, int]]:
    """The files and lines in which pyright finds an error."""
    found = json.loads(run("pyright", "--pythonpath", sys.executable, "--outputjson", *FILES))["generalDiagnostics"]
    errors = [one for one in found if one["severity"] == "error"]
    return {(pathlib.Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in errors}


def by_mypy() -> set[tuple[str, int]]:
    """The files and lines in which mypy finds an error."""
    found = run("mypy", "--python-executable", sys.executable, "--cache-dir", os.devnull, *FILES)
    return {(file, int(line)) for file, line in re.findall(r"^(\S+?):(\d+): error:", found, re.MULTILINE)}


def marked() -> set[tuple[str, int]]:
    """The files and lines that are marked as wrong."""
    lines = ((name, i, line) for name in FILES for i, line in enumerate((HERE / name).read_text().splitlines(), 1))
    return {(name, i) for name, i, line in lines if line.endswith("# wrong")}


def without_types() -> list[str]:
    """The public names of jdp whose type pyright does not know in full."""
    report = json.loads(run("pyright", "--verifytypes", "jdp", "--ignoreexternal", "--outputjson"))["typeCompleteness"]
    return [symbol["name"] for symbol in report["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]] or (
        [] if report["completenessScore"] == 1 else ["jdp"]
    )


def problems(tool: str, found: set[tuple[str, int]], wanted: set[tuple[str, int]]) -> Sequence[str]:
    return [
        *(f"tests/types/{name}:{line}: {tool} finds no error" for name, line in sorted(wanted - found)),
        *(f"tests/types/{name}:{line}: {tool} finds an error" for name, line in sorted(found - wanted)),
    ]


def main() -> int:
    wanted = marked()
    found = [*problems("pyright", by_pyright(), wanted), *problems("mypy", by_mypy(), wanted)]
    found += [f"{name}: its type is not known in full" for name in without_types()]
    print(*found or [f"{len(wanted)} wrong lines are flagged by pyright and by mypy; all of jdp has types"], sep="\n")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
