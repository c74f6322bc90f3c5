"""`python -m jdp plan`: a training script's step on machines that are not here, before any of them is paid for."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from ..topology.chips import CHIPS

ABOUT = """\
Runs a script up to its first training step, and compiles that step for machines that are not here: does it compile,
does it fit, how many rows would, what goes over the wire, and how long should it take. Nothing of the step is run.
Each machine has three lines: all of the state on each device, the optimizer's state cut over the devices
(shard_optimizer), and the parameters, too (shard_params).

  jdp plan train.py --topology h100 --hosts 1,2,8,64
  jdp plan train.py --topology v5e --shapes 4x4,8x8,16x16 -- --width 512

Times are estimates, of an ideal machine: every chip and link at the speed of its data sheet."""


def main(argv: Sequence[str]) -> int:
    """Prints a line for each size of the machine; `argv` is what follows `jdp plan`.

    Returns 0; 1 if there is no plan, with the reason on stderr; 130 after Ctrl-C.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    args = parser.parse_args(argv[:at])
    _check(parser, args)
    from .plan import plan  # it imports JAX, which --help need not wait for

    return plan(args, argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp plan", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("script", help="its own arguments come at the end, after --")
    add("--topology", required=True, metavar="NAME", help=f"what to plan for: {', '.join(CHIPS)}")
    add("--hosts", type=_counts, metavar="N,N", help="GPUs: numbers of hosts (1)")
    add("--per-host", type=_count, metavar="N", help="GPUs of a host (8)")
    add("--shapes", metavar="AxB,AxB", help="TPUs: shapes of slices, as 4x4,16x16 or 4x4x4,8x8x16")
    add("--batch-per-device", type=_count, metavar="N", help="rows of the batch on each device (the script's own)")
    add("--no-search", dest="search", action="store_false", help="do not look for the most rows that fit")
    add(
        "--no-values",
        dest="values",
        action="store_false",
        help="run the script with shapes in place of arrays: a model may be larger than this machine",
    )
    add("--json", action="store_true", help="one JSON document on stdout")
    add("--picture", type=pathlib.Path, metavar="FILE.png", help="efficiency against devices, drawn by matplotlib")
    add("--html", type=pathlib.Path, metavar="FILE.html", help="all of it as one page, with curves over the devices")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; there is 1 or more of them. Pass a whole number, as 8.")
    return int(text)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"it is {text!r}; a plan is made for 1 host or more. Pass whole numbers with commas, as 1,2,8."
        )
    return [int(part) for part in parts]


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses invalid arguments before the script is run."""
    name, path, html = args.topology, args.picture, args.html
    kind = CHIPS[name].kind if name in CHIPS else "unknown"
    for is_wrong, said in (
        (kind == "gpu" and args.shapes is not None, f"--shapes: {name} is a GPU; give --hosts"),
        (kind == "tpu" and (args.hosts or args.per_host), f"--hosts, --per-host: {name} is a TPU; give --shapes"),
        (kind == "tpu" and args.shapes is None, f"--shapes: {name} is a TPU; give shapes of its slices"),
        (path and path.suffix not in (".png", ".svg", ".pdf"), f"--picture: {path} ends in none of .png, .svg, .pdf"),
        (path and not path.absolute().parent.is_dir(), f"--picture: there is no folder {path and path.parent}"),
        (html and html.suffix != ".html", f"--html: {html} does not end in .html"),
        (html and not html.absolute().parent.is_dir(), f"--html: there is no folder {html and html.parent}"),
    ):
        if is_wrong:
            parser.error(f"argument {said}")
