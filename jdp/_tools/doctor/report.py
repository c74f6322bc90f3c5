"""The doctor's report for people, as titles, sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from ..tables import Block, Table, Text, Title, show_blocks
from .examine import FEW

SHOWN = 4  # failures of a kind that are told in full
WORDS = {"hang": "HANGS", "died": "DIES", "wrong": "WRONG", "error": "ERROR"}


def show(report: Mapping[str, Any], out: TextIO) -> None:
    """Prints the report, as wide as the terminal; 80 columns without a terminal."""
    show_blocks(blocks(report), out)


def blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    yield Title("Machine")
    yield Table(("", ""), _machine(report["machine"]))
    yield Title("Devices")
    if report["devices"]:
        yield Table(("device", "kind", "process", "memory in use", "computes"), list(_devices(report)))
    else:
        yield Text("none: JAX did not start")
    links = report["links"]
    yield Title("Links")
    if links["tests"]:
        yield from _links(links)
    else:
        yield Text(links["why"])
    if report["deterministic"]:
        yield Title("Deterministic")
        tests = report["deterministic"]
        rows = [(str(len(test["devices"])), _word(test), test.get("digest", "")[:16]) for test in tests]
        yield Table(("devices", "result", "SHA-256 after 20 steps"), rows)
    if findings := list(_findings(report)):
        yield Title("Findings")
        yield from findings
    yield Title("Verdict")
    yield Text(report["verdict"], "green" if report["ok"] else "red")


def _machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory = _memory(machine["memory_available_bytes"], machine["memory_bytes"], "{} of {} free")
    rows = [("system", f"{machine['system']}, {machine['cores']} cores, memory {memory}")]
    rows.append(("python", machine["python"]))
    rows.append(("packages", ", ".join(f"{k} {v}" for k, v in machine["versions"].items())))
    for card in machine["gpus"]:
        used = f"{card['memory.used']} of {card['memory.total']} MiB used, driver {card['driver_version']}"
        rows.append((f"GPU {card['index']}", f"{card['name']}, {used}"))
    if machine.get("platform_version"):
        rows.append(("backend", " ".join(machine["platform_version"].split())))
    rows.append(("settings", ", ".join(f"{k}={v}" for k, v in machine["settings"].items()) or "none that matter"))
    return rows


def _memory(part: int | None, whole: int | None, form: str) -> str:
    if whole is None:
        return "unknown"
    return form.format("?" if part is None else f"{part / 2**30:.1f}", f"{whole / 2**30:.1f} GiB")


def _devices(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    computes = {test["devices"][0]: _word(test) for test in report["computes"]}
    for d in report["devices"]:
        known = _memory(d["memory_in_use_bytes"], d["memory_limit_bytes"], "{} of {}")
        memory = "the host's" if d["platform"] == "cpu" else known
        yield d["name"], d["kind"], str(d["process"]), memory, computes.get(d["name"], "not tried")


def _word(test: Mapping[str, Any]) -> str:
    return {True: "ok", None: "left out", False: WORDS.get(test.get("failure", ""), "FAILED")}[test["ok"]]


def _links(links: Mapping[str, Any]) -> Iterator[Block]:
    together = [test for test in links["tests"] if test["test"] not in ("copy", "permute")]
    head = ("all devices", "result", "latency us", "GB/s", "bus GB/s")
    yield Table(head, [(test["test"], _word(test), *_numbers(test)) for test in together])
    for name, what in (("copy", "jax.device_put"), ("permute", "jax.lax.ppermute")):
        yield Text(f"{name}, by {what}: {links['pairs']}, GB/s")
        tests = [test for test in links["tests"] if test["test"] == name]
        yield _matrix(tests) if links["devices"] <= FEW else _list(tests)
        if taken := sorted(test["latency_us"] for test in tests if test["ok"]):
            yield Text(f"latency {taken[0]:.0f} to {taken[-1]:.0f} us")
    yield Text(links["sizes"])


def _numbers(test: Mapping[str, Any]) -> tuple[str, str, str]:
    if not test["ok"]:
        return "", "", ""
    return f"{test['latency_us']:.0f}", _short(test["algbw_gb_per_s"]), _short(test["busbw_gb_per_s"])


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def _matrix(tests: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(test["devices"][0] for test in tests))
    cell = {tuple(t["devices"]): _short(t["algbw_gb_per_s"]) if t["ok"] else _word(t).split()[-1] for t in tests}
    rows = [[name, *(cell.get((name, other), "-") for other in names)] for name in names]
    return Table(("from / to", *names), rows)


def _list(tests: Sequence[Mapping[str, Any]]) -> Table:
    rows = [(" -> ".join(t["devices"]), _word(t), *_numbers(t)[:2]) for t in tests]
    return Table(("from -> to", "result", "latency us", "GB/s"), rows)


def _findings(report: Mapping[str, Any]) -> Iterator[Text]:
    every = [report["start"], *report["computes"], *report["links"]["tests"], *report["deterministic"]]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for test in every:
        if test["ok"] is False:
            kinds.setdefault(test["test"], []).append(test)
    for kind, tests in kinds.items():
        yield from (_failure(test) for test in tests[:SHOWN])
        if len(tests) > SHOWN:
            yield Text(f"{kind}: {len(tests) - SHOWN} more, marked in the table above", "red")
    for test in every:
        if "cured_by_nccl_p2p_disable" in test:
            cured = "works" if test["cured_by_nccl_p2p_disable"] else "fails as well"
            yield Text(f"  tried: with NCCL_P2P_DISABLE=1, {test['test']} {cured}.")
    helps: dict[str, dict[str, None]] = {}  # a remedy, and the tests it is for
    for kind, tests in kinds.items():
        for remedy in (remedy for test in tests for remedy in test["remedies"]):
            helps.setdefault(remedy, {})[kind] = None
    yield from (Text(f"  try, for {', '.join(kinds)}: {remedy}.") for remedy, kinds in helps.items())
    yield from (Text(text) for text in dict.fromkeys(test["text"] for test in every if test["ok"] is None))
    for note in report["notes"]:
        yield Text(f"{note['level']}: {note['text']}", "yellow" if note["level"] == "note" else "red")


def _failure(test: Mapping[str, Any]) -> Text:
    names = test["devices"]
    pair = test["test"] in ("copy", "permute", "compute", "start")
    where = " -> ".join(names) if pair else f"over {len(names)} devices"
    said = " ".join(word for word in (test["test"], where, WORDS[test["failure"]]) if word)
    return Text(f"{said}: {test['text']}", "red")
