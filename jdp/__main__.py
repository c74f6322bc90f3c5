"""The commands `jdp` and `python -m jdp`."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

from ._version import __version__

_USAGE = """\
usage: jdp COMMAND ...

torch.nn.DataParallel for JAX and Flax: the commands that go with the package.

  launch   run a script as several processes, on this machine or as one node of many
  doctor   say what this machine has, and whether its devices and their links work
  plan     compile a script's training step for machines that are not here, and estimate its speed
  replay   make one training step of a script again, from its checkpoints, to see what is wrong in it

`jdp COMMAND --help` says more. `jdp --version` prints the version."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command that `argv` names, and returns the code to exit with: 2 for wrong usage, 130 after Ctrl-C."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    try:
        return _run(command, rest)
    except SystemExit as stop:  # argparse has printed the help, or what is wrong
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print(f"jdp {command}: interrupted", file=sys.stderr)
        return 130


def _run(command: str, rest: list[str]) -> int:
    if command == "launch":
        from ._launch import cli as _launch

        return _launch.main(rest)
    if command == "doctor":
        from ._tools.doctor import cli as _doctor

        return _doctor.main(rest)
    if command == "plan":
        from ._tools.plan import cli as _plan

        return _plan.main(rest)
    if command == "replay":
        from ._tools.replay import cli as _replay

        return _replay.main(rest)
    if command in ("-h", "--help"):
        print(_USAGE)
        return 0
    if command == "--version":
        print(__version__)
        return 0
    what = f"{command!r} is no command of jdp" if command else "no command was given"
    print(f"jdp: {what}; the commands are launch, doctor, plan and replay. See jdp --help.", file=sys.stderr)
    return 2


def run() -> NoReturn:
    """Runs `jdp` or `python -m jdp`, and ends the process with the command's code."""
    code = main()
    if code == 130 and threading.active_count() > 1:  # a compiler may be running, which ignores signals
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
