"""`python -m jdp replay`: makes one training step of a run again, on this machine, to see what is wrong in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

ABOUT = """\
Makes one training step of a script again: the step that Checkpointer.save called N.

  jdp replay CHECKPOINTS --step 1200 train.py --width 512
  jdp replay CHECKPOINTS --step 1200 --pdb train.py --width 512

The script runs as it does by itself. Its Checkpointer over CHECKPOINTS restores the newest checkpoint before step N,
and the steps up to N are made. It says of step N: which leaves of the batch, the state and the gradient are not
finite, and their replicas and rows; the gradient's norm, the loss and the metrics; the bits of the state after it, and
whether a checkpoint of step N has the same. Then the run ends. No Checkpointer writes anything in the replay; what
else the script writes, it writes.

The bits are those of the run on the same number of devices, if the data is a function of the step; with
train_step(..., deterministic=True) on any number."""


def main(argv: Sequence[str]) -> int:
    """Makes the step that `argv`, which follows `jdp replay`, asks for.

    Returns 0; 1 if the step could not be made, with the reason on stderr.
    """
    args = _parser().parse_args(argv)
    from .run import ReplayError, replay  # it imports JAX, which --help need not wait for

    try:
        replay(args.directory, args.step, args.script, args.args, args.pdb)
    except (ReplayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp replay",
        usage="jdp replay CHECKPOINTS --step N [--pdb] script [args ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("directory", metavar="CHECKPOINTS", help="the directory of the script's Checkpointer")
    add("--step", type=_step, required=True, metavar="N", help="the step to make again, as it was called when saved")
    add("--pdb", action="store_true", help="open the debugger in the line that makes step N, before it is made")
    add("script", help="what to run")
    # Not required by argparse, which would call them missing where the script is.
    add("args", nargs=argparse.REMAINDER, help="its arguments; replay's own come before the script").required = False
    return parser


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; the first step is 1. Pass a whole number, as 1200.")
    return int(text)
