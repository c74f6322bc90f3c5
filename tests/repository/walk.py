"""The newcomer's walk: what a person sees who clones the repository and tries what the README says, and how long each
silence lasts, in a new environment.

    python tests/repository/walk.py            the README's commands and programs, the examples, each --help
    python tests/repository/walk.py --all      the programs of the pages in docs/, too

What is walked is the last commit. Everything runs in a terminal, as it does for a person. It ends with a table of the
silences, and with code 1 where a command failed or said nothing for more than 10 seconds (--limit).
"""

import argparse
import errno
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"
FEW = "--train-rows 512 --epochs 1"
MAKES = [f'make mnist ACCELERATOR= ARGS="{FEW}"', 'make test ARGS="tests/core/test_gather.py -n 0"']
EXAMPLES = {  # a few steps of each
    "mnist.py": FEW,
    "mnist_nnx.py": f"{FEW} --devices 1",
    "char_gpt.py": "--devices 1 --steps 4 --width 32 --layers 1 --context 32",
    "resnet.py": f"{FEW} --devices 1 --width 4 --blocks 1",
    "multi_process.py": "--train-rows 252 --epochs 1",
    "from_torch.py": "",
    "tensor_parallel.py": "--meshes 2x2 2x1 --steps 4",
}
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# variables that a newcomer does not have
LEFT_OUT = re.compile(
    r"XLA_|JAX_|JDP_(?!TESTS_RUN)|NPROC|PJRT_|PYTEST|PYTHON|PIP_QUIET|VIRTUAL_ENV|VENV|ARGS|MAKE|COLUMNS|LINES"
)

# as tests/conftest.py compiles: without LLVM's optimization, and with XLA's older emitters
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}


class Step(NamedTuple):
    """What was run: the whole time, the longest time without a word, and after which words that was."""

    command: str
    code: int
    seconds: float
    silence: float
    after: str


def commands(clone: Path, all_pages: bool) -> list[str]:
    """What a newcomer types after the two `MAKES`, in the order of the README."""
    found = [f".venv/bin/jdp {name}--help" for name in ("", "launch ", "doctor ", "plan ", "replay ")]
    for path in sorted((clone / "examples").glob("[!_]*.py")):
        if path.name == "ray_mnist.py":
            continue  # it has an environment of its own, of 1.3 GB
        if EXAMPLES.get(path.name) != "":  # that has no options
            found.append(f"{PYTHON} examples/{path.name} --help")
        if path.name in EXAMPLES and path.name != "mnist.py":  # which make mnist has run
            found.append(f"{PYTHON} examples/{path.name} {EXAMPLES[path.name]}".strip())
    pages = [clone / "README.md", *(sorted((clone / "docs").glob("*.md")) if all_pages else [])]
    for page in pages:
        for number, program in enumerate(PROGRAM.findall(page.read_text(encoding="utf-8")), 1):
            if re.search(r"^import .*\btorch\b", program, re.MULTILINE):
                continue  # torch is not part of the environment
            path = clone / f"walk_{page.stem}_{number}.py"
            path.write_text(program, encoding="utf-8")
            found.append(f"{PYTHON} {path.name}")
    return found


def run(command: str, folder: Path, quick: bool = False) -> Step:
    """Runs it in a terminal of its own, and shows what it says."""
    print(f"\n$ {command}", flush=True)
    environ = {name: value for name, value in os.environ.items() if not LEFT_OUT.match(name)} | {"TERM": "xterm"}
    environ |= QUICK if quick else {}
    ours, theirs = pty.openpty()
    begin = last = time.monotonic()
    with subprocess.Popen(
        command, shell=True, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        silence, after, said = 0.0, "", "the command was typed"
        while True:
            select.select([ours], [], [])
            now, chunk = time.monotonic(), _read(ours)
            if now - last > silence:
                silence, after = now - last, said
            last = now
            if not chunk:
                break
            print(chunk.decode(errors="replace"), end="", flush=True)
            words = re.sub(rb"\x1b\[[0-9;?]*\w", b"", chunk).split()
            said = b" ".join(words).decode(errors="replace")[-60:] or said
    os.close(ours)
    return Step(command, process.returncode, time.monotonic() - begin, silence, after)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError as error:  # Linux's way to say that the other end is closed
        if error.errno != errno.EIO:
            raise
        return b""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run the programs of docs/, too")
    parser.add_argument("--quick", action="store_true", help="compile quickly, as the tests do, and not as a newcomer")
    parser.add_argument("--limit", type=float, default=10, help="the longest silence in seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walk-") as scratch:
        clone = Path(scratch) / "jdp"
        steps = [run(f"git clone --quiet {ROOT} {clone}", Path(scratch))]
        if not steps[0].code:
            steps += [run(command, clone, args.quick) for command in MAKES]
        if not any(step.code for step in steps):
            steps += [run(command, clone, args.quick) for command in commands(clone, args.all)]
    print(f"\n{'in all':>8} {'silence':>8}  command")
    for step in sorted(steps, key=lambda step: -step.silence):
        wrong = f"  FAILED: {step.code}" if step.code else ""
        print(f"{step.seconds:6.1f} s {step.silence:6.1f} s  {step.command}{wrong}")
        if step.silence > args.limit:
            print(f"{'':19}TOO LONG, after: {step.after}")
    return int(any(step.code or step.silence > args.limit for step in steps))


if __name__ == "__main__":
    sys.exit(main())
