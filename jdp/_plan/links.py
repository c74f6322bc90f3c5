"""How long collectives take on a chip's links, by the formulas of those who build on them: estimates, at full speed."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from .._core.devices import Device
from .._topology.chips import CHIPS, Chip, Protocol

SOURCES = (
    'one ring or tree: Chan et al., "Collective communication: theory, practice, and experience" (2007); bytes by '
    'bus bandwidth: NCCL Tests, "Performance reported by NCCL tests"',
    'within and between hosts at once, and over a torus: Google DeepMind, "How to Scale Your Model" (2025), parts 3 '
    "and 12 (GPUs)",
)

_TIMES = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}  # that the bytes go round
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
_ONCE = ("collective-broadcast", "collective-permute")


def wire_bytes(kind: str, size: int, group: int) -> float:
    """Bytes that each device of the group sends: the payload, times NCCL's factor for the bus bandwidth.

    The payload is an all-gather's result and any other collective's operand, in bytes per device.
    """
    _check(kind)
    return size * float(group > 1) if kind in _ONCE else _TIMES.get(kind, 1) * size * (group - 1) / group


def _check(kind: str) -> None:
    if kind not in (*_TIMES, *_ALL_TO_ALL, *_ONCE):
        raise ValueError(f"jdp.plan: a collective is {kind!r}, for which there is no formula. Report it, please.")


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between devices of one chip: hosts of GPUs, or a torus of TPUs.

    `shape` is (hosts, GPUs of each) or the sides of the torus.
    """

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Network:
        """That of described devices, or of real ones of a kind that is known."""
        kind = devices[0].device_kind
        chip = next((chip for chip in CHIPS.values() if chip.device_kind == kind), None)
        if chip is None:
            known = ", ".join(chip.device_kind for chip in CHIPS.values())
            raise ValueError(f"jdp.plan: a device is a {kind!r}; its figures are not known here. Plan for {known}.")
        if chip.kind == "gpu":
            hosts = collections.Counter(d.process_index for d in devices)
            return cls(chip, (len(hosts), max(hosts.values())))
        places = [getattr(d, "coords", (0,)) for d in devices]
        return cls(chip, tuple(max(side) - min(side) + 1 for side in zip(*places, strict=True)))

    def seconds(self, kind: str, size: int, group: int) -> float:
        """Of one collective, as if nothing else ran: `size` as for `wire_bytes`, `group` devices."""
        _check(kind)
        if group <= 1:
            return 0.0
        way = self._torus if self.chip.kind == "tpu" else self._hosts
        return min(p.launch + way(kind, size / p.share, group, p) for p in self.chip.protocols)

    def _hosts(self, kind: str, size: float, group: int, protocol: Protocol) -> float:
        """GPUs: each level of the network works on its part at the same time, and the slowest decides."""
        chip, within = self.chip, min(group, self.shape[1])
        hosts = -(-group // within)
        hops = (within - 1) * protocol.hop + math.ceil(math.log2(hosts)) * protocol.network_hop
        if kind in _TIMES:
            # reduce-scatter within the host, the rest between hosts on each GPU's own part, all-gather within
            local = (within - 1) / within * size / chip.link
            remote = (hosts - 1) / hosts * size / within / chip.network if hosts > 1 else 0.0
            return _TIMES[kind] * (max(local, remote) + hops)
        if kind in _ALL_TO_ALL:
            local = (within - 1) / group * size / chip.link
            remote = (group - within) / group * size / chip.network if hosts > 1 else 0.0
            return max(local, remote) + (protocol.network_hop if hosts > 1 else protocol.hop)
        return size / (chip.network if hosts > 1 else chip.link) + hops

    def _torus(self, kind: str, size: float, group: int, protocol: Protocol) -> float:
        """TPUs: all axes at once; a ring has both directions of its links, a line one that every byte must pass."""
        whole = group == math.prod(self.shape)
        sides = [side for side in self.shape if side > 1] if whole else [group]
        rings = [whole and self._is_ring(side) for side in sides]
        hops = sum(side // 2 if ring else side - 1 for side, ring in zip(sides, rings, strict=True)) * protocol.hop
        if kind in _ALL_TO_ALL:  # half of each device's bytes cross the middle of the longest axis
            across = max(side / (2 if ring else 1) for side, ring in zip(sides, rings, strict=True))
            return size / 4 * across / self.chip.link + hops
        if kind == "collective-permute":
            return size / self.chip.link + hops
        bandwidth = sum(self.chip.link * (2 if ring else 1) for ring in rings)
        if kind in _TIMES:
            return _TIMES[kind] * ((group - 1) / group * size / bandwidth + hops)
        return size / bandwidth + hops

    def _is_ring(self, side: int) -> bool:
        """Whether the ends of an axis are connected: of v4 and v5p those of whole cubes, of the others the longest."""
        if len(self.chip.domain) == 3:
            return all(other % 4 == 0 for other in self.shape)
        return side == self.chip.domain[0]
