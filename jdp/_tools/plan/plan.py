"""Makes a plan, from the script to the printed result."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from ..._core.devices import Device
from ..tables import as_long_as_read
from ..topology.chips import CHIPS
from ..topology.topology import how_to_install, topology
from .lines import Line, lines
from .print import as_json, page, picture, show
from .script import PlanError, Step, capture_step


def plan(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Makes the plan that the command's arguments ask for, and returns the exit code. `given` are the script's own.

    After Ctrl-C the lines that are finished are printed and drawn.
    """
    found: list[Line] = []
    try:
        _look_for_matplotlib(args)
        machines = _topologies(args)
        if pathlib.Path(args.script).is_file():
            print(f"jdp plan: running {args.script} up to its first step", file=sys.stderr, flush=True)
        step = capture_step(args.script, given, args.values)
        if args.batch_per_device is not None and not step.is_cut:
            raise PlanError("jdp.plan: the step's batch is replicated; no rows to set. Leave the option out.")
        try:
            for one in lines(step, CHIPS[args.topology], machines, args.batch_per_device or step.rows, args.search):
                found.append(one)
        finally:
            if found:
                _show(args, step, found)
    except (PlanError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"; {len(found)} of its lines were finished" if found else ""
        print(f"jdp plan: interrupted{kept}", file=sys.stderr)
        return 130
    return 0 if any(one.compiles for one in found) else 1


def _show(args: argparse.Namespace, step: Step, found: Sequence[Line]) -> None:
    chip, title = CHIPS[args.topology], f"train_step of {step.program.label}"
    if args.picture is not None:
        picture(found, chip, title).savefig(args.picture, dpi=120)
    if args.html is not None:
        page(found, chip, title).save(args.html)
    with as_long_as_read(sys.stdout):
        print(as_json(found, chip)) if args.json else show(found, chip, title, sys.stdout)


def _look_for_matplotlib(args: argparse.Namespace) -> None:
    """Says before minutes of compiling that the plan has no picture, for lack of matplotlib."""
    if args.picture is not None and importlib.util.find_spec("matplotlib") is None:
        args.picture, no = None, "jdp.plan: matplotlib is not installed; there will be no picture."
        print(f"{no} {how_to_install('examples')}", file=sys.stderr)


def _topologies(args: argparse.Namespace) -> list[tuple[str, tuple[Device, ...]]]:
    """Returns the machines to compile for, with their names; the first is one device alone."""
    chip = CHIPS.get(args.topology)
    if chip is not None and chip.kind == "tpu":
        alone = "x".join("1" * len(chip.domain))
        return [(shape, topology(args.topology, shape)) for shape in (alone, *args.shapes.split(","))]
    found = [("1 x 1", topology(args.topology, hosts=1, per_host=1))]
    for hosts in args.hosts or [1]:
        devices = topology(args.topology, hosts=hosts, per_host=args.per_host)
        found.append((f"{hosts} x {len(devices) // hosts}", devices))
    return found
