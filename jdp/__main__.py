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
    """Runs the command that `argv` names, and returns the code to exit with."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
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
    """Runs `jdp` or `python -m jdp`, and ends the process with the command's code, 130 after Ctrl-C."""
    try:
        code = main()
    except KeyboardInterrupt:  # while the command was imported; later it handles that itself
        print("jdp: interrupted", file=sys.stderr)
        code = 130
    if code == 130 and threading.active_count() > 1:  # a compiler may be running, which ignores signals
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
