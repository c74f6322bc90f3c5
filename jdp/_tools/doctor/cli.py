"""`python -m jdp doctor`: what the machine has, and whether its devices and links work. It never hangs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..tables import as_long_as_read, say
from .advice import notes, remedies
from .examine import Examination, compared, pairs, plan
from .machine import facts
from .report import show

ABOUT = """\
Says what this machine has, and whether its devices and the links between them work: whole numbers are sent over
every link and each word is compared. Every test runs in a process of its own with a deadline, so that a link that
hangs, lies or crashes is named, with what is known to help. Exit code: 0 all is well, 1 something failed, 2 usage."""


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise ValueError
    return number


_positive.__name__ = "number above zero"  # what argparse calls it in "invalid ... value"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jdp doctor", description=ABOUT)
    parser.add_argument("--devices", metavar="D", help="a count, or names like gpu:0,gpu:1; all of them by default")
    parser.add_argument("--no-links", action="store_true", help="look at machine and devices only")
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=30.0,
        metavar="S",
        help="seconds for one test (30); JAX's start has twice as many",
    )
    parser.add_argument(
        "--mebibytes", type=_positive, default=16.0, metavar="M", help="size of the bandwidth tests, per device (16)"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="train 20 steps with deterministic=True on 1, 2, 4 ... devices, and compare the bits",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def main(argv: Sequence[str]) -> int:
    """Examines the machine and prints a report: 0 if all is well, 1 if something failed, 2 for wrong usage.

    GPUs are asked through a process that is killed when it gives no answer; the calling process starts no device.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    size = int(args.mebibytes * 2**20)
    report = examine(args.devices, not args.no_links, args.timeout, size, args.deterministic)
    if report["start"].get("failure") == "refused":
        parser.print_usage(sys.stderr)
        print(report["start"]["text"], file=sys.stderr)
        return 2
    with as_long_as_read(sys.stdout):
        print(json.dumps(report, indent=2)) if args.json else show(report, sys.stdout)
    return 0 if report["ok"] else 1


def examine(chosen: str | None, links: bool, seconds: float, size: int, deterministic: bool = False) -> dict[str, Any]:
    """Returns the whole report, as `--json` prints it."""
    environ = dict(os.environ)
    machine = facts(environ)
    examination = Examination(environ, seconds, chosen)
    try:
        say("doctor", "starting JAX")
        answer = examination.start()
        devices = answer.get("devices", [])
        every = plan(len(devices), deterministic)
        tests = [(test, on) for test, on in every if links or test in ("compute", "deterministic")]
        results = examination.run(tests, devices, size)
    finally:
        examination.close()
        say("doctor", "")
    machine["platform_version"] = answer.get("platform_version")
    said = notes(machine, devices, environ) + [{"level": "note", "text": text} for text in answer.get("imbalance", [])]
    start = {"test": "start", "devices": [], "ok": True}
    if "failure" in answer:
        start |= {"ok": False, "failure": answer["failure"], "text": answer["text"]}
        start["remedies"] = remedies("start", answer["failure"], "", 0)
    report = {"jdp_doctor": 1, "machine": machine, "start": start, "devices": devices, "notes": said}
    report["computes"] = [result for result in results if result["test"] == "compute"]
    others = [result for result in results if result["test"] not in ("compute", "deterministic")]
    report["links"] = _links(others, len(devices), links, size)
    report["deterministic"] = [result for result in results if result["test"] == "deterministic"]
    compared(report["deterministic"])
    return report | _verdict(report)


def _links(results: list[dict[str, Any]], n: int, asked: bool, size: int) -> dict[str, Any]:
    why = "none: there is one device" if n == 1 else "not tested: JAX did not start"
    if results or not asked:
        why = "" if results else "not tested: --no-links"
    return {
        "tests": results,
        "why": why,
        "devices": n,
        "pairs": pairs(n)[1] if results else "",
        "sizes": f"Latency: one run of 4 KiB, called from Python. GB/s: bytes of the whole buffer ({size / 2**20:g} "
        f"MiB) by the seconds of a run. Bus GB/s: times 2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter and "
        f"all_gather, as nccl-tests define it.",
    }


def _verdict(report: dict[str, Any]) -> dict[str, Any]:
    tests = [report["start"], *report["computes"], *report["links"]["tests"], *report["deterministic"]]
    failed = [test for test in tests if test["ok"] is False]
    left_out = sum(test["ok"] is None for test in tests)
    problems = sum(note["level"] == "problem" for note in report["notes"])
    others = len(report["notes"]) - problems
    n = len(report["devices"])
    said = f"{n} device{'s' * (n != 1)}, {len(tests) - 1} test{'s' * (len(tests) != 2)}"
    if failed or left_out or problems:
        kinds = ", ".join(dict.fromkeys(test["test"] for test in failed))
        said = f"FAILED: {said}, {len(failed)} failed{f' ({kinds})' if kinds else ''}, {left_out} left out"
        said += f", {problems} problem{'s' * (problems != 1)}" if problems else ""
    else:
        said = f"All is well: {said}, none failed"
    said += f"; {others} note{'s' * (others != 1)} above" if others else ""
    return {"ok": not (failed or left_out or problems), "verdict": said + "."}
