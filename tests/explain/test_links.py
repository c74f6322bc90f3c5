"""The seconds of collectives, against numbers that were worked out apart from the formulas."""

import types

import pytest

from jdp._tools.explain.estimate import Network, wire_bytes
from jdp._tools.topology.chips import CHIPS

H100, A100, V5E, V5P = (CHIPS[name] for name in ("h100", "a100", "v5e", "v5p"))
GIB = 2**30
KINDS = [
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]
NETWORKS = [
    Network(H100, (1, 8)),
    Network(H100, (64, 8)),
    Network(A100, (2, 4)),
    Network(V5E, (16, 16)),
    Network(V5P, (8, 8, 16)),
]


def devices(network):
    n = 1
    for side in network.shape:
        n *= side
    return n


def test_bytes_on_the_wire_have_nccls_factors():
    # NCCL Tests: bus bandwidth / algorithm bandwidth is 2(n-1)/n, (n-1)/n, (n-1)/n, (n-1)/n, 1
    found = [wire_bytes(kind, 800, 8) for kind in KINDS if kind != "ragged-all-to-all"]
    assert found == [1400, 700, 700, 700, 800, 800]
    assert all(wire_bytes(kind, 800, 1) == 0 for kind in KINDS)


def test_all_reduce_in_a_host_simulated_step_by_step():
    """A ring: in each of 2(n-1) steps every GPU sends one n-th of the array to the next."""
    n, size = 8, GIB
    steps = [size / n / 450e9 + 3.4e-6 for _ in range(2 * (n - 1))]
    assert Network(H100, (1, n)).seconds("all-reduce", size, n) == pytest.approx(sum(steps) + 8.4e-6)


def test_all_reduce_of_one_gigabyte_on_eight_h100s():
    # 2 * 7/8 * 1e9 / 450e9 = 3.889 ms of bandwidth, 14 hops of 3.4 us, 8.4 us to start
    assert Network(H100, (1, 8)).seconds("all-reduce", 10**9, 8) == pytest.approx(3.889e-3 + 47.6e-6 + 8.4e-6, rel=1e-4)


def test_a_small_message_goes_by_the_quick_protocol():
    # NCCL's LL: 3.6 us to start, 14 hops of 0.47 us, and a quarter of the links' bytes are payload
    assert Network(H100, (1, 8)).seconds("all-reduce", 8000, 8) == pytest.approx(3.6e-6 + 14 * (0.47e-6 + 4000 / 450e9))


def test_between_hosts_the_network_cards_decide():
    # Each of 8 GPUs takes an eighth over its own 50 GB/s, so that a host has 400 GB/s: 2 * 63/64 * 1e9 / 400e9
    found = Network(H100, (64, 8)).seconds("all-reduce", 10**9, 512)
    latency = 2 * (7 * 3.4e-6 + 6 * 9.6e-6) + 8.4e-6
    assert found == pytest.approx(2 * 63 / 64 * 1e9 / 400e9 + latency, rel=1e-6)
    # with one GPU a host there is nothing but the network
    found = Network(A100, (2, 1)).seconds("all-gather", 10**9, 2)
    assert found == pytest.approx(0.5 * 1e9 / 25e9 + 9.6e-6 + 8.4e-6, rel=1e-6)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for network in NETWORKS:
        n, start = devices(network), network.chip.protocols[0].launch  # that of large messages
        both = sum(network.seconds(kind, GIB, n) - start for kind in ("reduce-scatter", "all-gather"))
        assert network.seconds("all-reduce", GIB, n) - start == pytest.approx(both)


def test_a_ring_of_tpus_has_both_directions_and_a_line_one():
    # 16x16 v5e: both axes are rings, 2 axes * 2 directions * 45 GB/s; 4x4: lines, 2 * 45 GB/s
    full = Network(V5E, (16, 16)).seconds("all-gather", 10**9, 256)
    assert full == pytest.approx(255 / 256 * 1e9 / 180e9 + 16e-6, rel=1e-6)
    part = Network(V5E, (4, 4)).seconds("all-gather", 10**9, 16)
    assert part == pytest.approx(15 / 16 * 1e9 / 90e9 + 6e-6, rel=1e-6)
    # v5p in cubes of 4: three rings
    cube = Network(V5P, (4, 4, 4)).seconds("all-reduce", 10**9, 64)
    assert cube == pytest.approx(2 * (63 / 64 * 1e9 / 540e9 + 6e-6), rel=1e-6)
    # Sides of one chip are no axes. 15 GB into the corner of a 4x4, over its two links: the book's question 6.
    assert Network(V5P, (1, 1, 2)).seconds("all-gather", 10**9, 2) == pytest.approx(0.5e9 / 90e9 + 1e-6)
    assert Network(V5E, (4, 4)).seconds("all-gather", 16 * 10**9, 16) == pytest.approx(0.167, rel=0.01)


def test_all_to_all_on_a_ring_is_a_quarter_of_an_all_gather():
    # of the whole array, as the book says: each device has a 16th of it
    line, whole = Network(V5E, (16, 1)), 16 * 10**9
    gather = line.seconds("all-gather", whole, 16) - 8e-6
    assert line.seconds("all-to-all", whole // 16, 16) - 8e-6 == pytest.approx(gather / 4 * 16 / 15, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_limits(kind):
    for network in NETWORKS:
        n = devices(network)
        assert network.seconds(kind, GIB, 1) == 0
        sizes = [network.seconds(kind, size, n) for size in (0, 1, 1000, 10**5, 10**6, 10**7, GIB, 2 * GIB)]
        assert sizes == sorted(sizes) and sizes[0] > 0 and sizes[-1] > sizes[-2]
        # In the limit the latency is nothing beside twice the bytes.
        assert network.seconds(kind, 2000 * GIB, n) == pytest.approx(2 * network.seconds(kind, 1000 * GIB, n), rel=1e-3)


def test_more_hosts_never_make_an_all_reduce_faster():
    times = [Network(H100, (hosts, 8)).seconds("all-reduce", GIB, 8 * hosts) for hosts in (2, 4, 64, 512, 2048)]
    assert times == sorted(times)
    assert times[-1] < 1.2 * 2 * GIB / 400e9  # and a fat tree keeps it from growing without end


def test_an_unknown_collective_is_refused():
    for call in (lambda: wire_bytes("all-sing", 1, 2), lambda: NETWORKS[0].seconds("all-sing", 1, 2)):
        with pytest.raises(ValueError, match=r"jdp\.plan: a collective is 'all-sing'"):
            call()


def test_the_network_is_read_off_the_devices():
    def gpu(host):
        return types.SimpleNamespace(device_kind="NVIDIA A100-SXM4-80GB", process_index=host)

    assert Network.of([gpu(0), gpu(0), gpu(1), gpu(1)]) == Network(A100, (2, 2))
    places = [(x, y, 0) for y in range(4) for x in range(2)]
    tpus = [types.SimpleNamespace(device_kind="TPU v5 lite", process_index=0, coords=place) for place in places]
    assert Network.of(tpus) == Network(V5E, (2, 4, 1))
    with pytest.raises(ValueError, match=r"jdp\.plan: a device is a 'abacus'; .* Plan for NVIDIA"):
        Network.of([types.SimpleNamespace(device_kind="abacus")])
