"""The copies of a replicated leaf are one value; where one bit differs, leaf, process and device are named."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from laws import free_port

from jdp._core.fingerprint import _comparison, check_replicas, fingerprint, start
from jdp._core.replica_mesh import make_mesh


def replicas(x, mesh, others=None):
    """A replicated array whose copies on the devices `others` (by their place in the mesh) are what they say."""
    others, mesh = others or {}, getattr(mesh, "jax_mesh", mesh)
    copies = [jax.device_put(others.get(i, x), d) for i, d in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(np.shape(x), NamedSharding(mesh, PartitionSpec()), copies)


@pytest.fixture
def mesh(devices):
    return make_mesh(tuple(devices))


W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def one_ulp(x, index=(1, 2)):
    y = x.copy()
    y[index] = np.nextafter(y[index], np.float32(9))
    return y


@pytest.mark.one_case
def test_equal_copies_pass(devices, n):
    mesh = make_mesh(tuple(devices[:n]))
    tree = {"w": replicas(W, mesh), "key": replicas(jax.random.key(1), mesh), "host": W, "none": None, "n": 3}
    tree |= {
        "cut": jax.device_put(np.arange(n), NamedSharding(mesh.jax_mesh, PartitionSpec("data"))),
        "one": jnp.ones(2),
    }
    check_replicas(tree, mesh, "check_replicas")
    check_replicas({}, mesh, "check_replicas")
    check_replicas(replicas(np.zeros((0, 3)), mesh), mesh, "check_replicas")


def test_a_tree_of_empty_arrays_passes(mesh):
    """XLA refuses a program whose operands are all empty."""
    check_replicas({"a": replicas(W[:0], mesh), "b": replicas(W[:, :0], mesh)}, mesh, "test")


@pytest.mark.parametrize("device", [0, 5, 7])
def test_one_ulp_on_one_device_is_named(mesh, refused, device):
    tree = {"b": replicas(W, mesh), "w": replicas(W, mesh, {device: one_ulp(W)})}
    assert (np.asarray(tree["w"]) == W).all() or device == 0  # JAX itself does not notice
    where = rf"\['w'\] on process 0, CpuDevice\(id={device}\) is not what it is on 7 of 8 devices"
    with refused(ValueError, "check_replicas", match=rf"of 2 replicated leaves 1 differ: {where};"):
        check_replicas(tree, mesh, "check_replicas")


@pytest.mark.one_case
@pytest.mark.parametrize(
    "x, y",
    [
        (np.float32([0.0]), np.float32([-0.0])),
        (np.array([True, False]), np.array([False, True])),
        (np.int8([1, 2]), np.int8([1, 3])),
        (np.ones(3, ml_dtypes.bfloat16), np.full(3, 1.0078125, ml_dtypes.bfloat16)),
        (np.complex64([1 + 2j]), np.complex64([2 + 1j])),
        (np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32)),
        (np.float32(3), np.float32(4)),
        (jax.random.key(0), jax.random.key(1)),
    ],
    ids=["zero", "bool", "int8", "bfloat16", "complex", "nan", "0-d", "key"],
)
def test_every_dtype(mesh, refused, x, y):
    check_replicas([replicas(x, mesh)], mesh, "verb")
    with refused(ValueError, "verb", match=re.escape("[0] on process 0, CpuDevice(id=3) is not")):
        check_replicas([replicas(x, mesh, {3: y})], mesh, "verb")


def test_a_leaf_of_another_mesh_over_the_same_devices(mesh, devices, refused):
    two_axes = Mesh(np.array(devices[::-1]).reshape(2, 4), ("a", "b"))
    for x, y in ((W, one_ulp(W)), (jax.random.key(0), jax.random.key(1))):
        check_replicas([replicas(x, two_axes), replicas(W, mesh)], mesh, "verb")
        with refused(ValueError, "verb", match=re.escape("[0] on process 0, CpuDevice(id=6) is")):
            check_replicas([replicas(x, two_axes, {1: y})], mesh, "verb")


def test_many_leaves_and_devices_are_counted(mesh, refused):
    other = dict.fromkeys((1, 2, 3, 4, 6), one_ulp(W))
    tree = [replicas(W, mesh, other) for _ in range(5)]
    with refused(ValueError, "verb", match="of 5 replicated leaves 5 differ: .*, and 2 more; all copies"):
        check_replicas(tree, mesh, "verb")
    of_one = r"\[0\] on process 0, CpuDevice\(id=0\), CpuDevice\(id=5\), CpuDevice\(id=7\) is not what it is on 5 of 8"
    with refused(ValueError, "verb", match=of_one):
        check_replicas(tree, mesh, "verb")
    other = {i: W + i for i in range(1, 7)}
    of_many = r"CpuDevice\(id=1\), CpuDevice\(id=2\), CpuDevice\(id=3\) and 3 more devices is not what it is on 2 of 8"
    with refused(ValueError, "verb", match=of_many):
        check_replicas([replicas(W, mesh, other)], mesh, "verb")


def test_the_majority_is_right_and_a_tie_takes_the_primary(mesh, devices, refused):
    with refused(ValueError, "verb", match=r"CpuDevice\(id=0\) is not what it is on 7 of 8"):
        check_replicas([replicas(W, mesh, {0: one_ulp(W)})], mesh, "verb")
    two = make_mesh(tuple(devices[:2]))
    with refused(ValueError, "verb", match=r"CpuDevice\(id=1\) is not what it is on 1 of 2"):
        check_replicas([replicas(W, two, {1: one_ulp(W)})], two, "verb")


def test_it_is_one_program_with_one_collective(mesh, compilations):
    tree = [replicas(W + i, mesh) for i in range(40)]
    check_replicas(tree, mesh, "verb")
    compilations()
    check_replicas([replicas(W - i, mesh) for i in range(40)], mesh, "verb")
    assert compilations() == 0
    text = _comparison(mesh, ()).lower(tree).compile().as_text()
    assert text.count(" all-reduce(") == 1 and "all-gather" not in text


def test_start_does_not_wait_and_the_tree_may_be_donated(mesh, refused):
    good, bad = replicas(W, mesh), replicas(W, mesh, {4: one_ulp(W)})
    checks = [start([x], mesh) for x in (good, bad)]
    clear = jax.jit(lambda x: x * 0, donate_argnums=0)
    for x in (good, bad):
        clear(x)
        assert x.is_deleted()
    checks[0]("verb")
    with refused(ValueError, "verb", match=r"\[0\] on process 0, CpuDevice\(id=4\)"):
        checks[1]("verb")


PROCESS = """
    import sys
    import jdp
    jdp.virtual_cpu_devices(2)
    import jax, numpy as np
    rank, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, 2, rank)
    from jdp._core.fingerprint import check_replicas
    from jax.sharding import NamedSharding, PartitionSpec
    from jdp._core.fingerprint import fingerprint
    from jdp._core.replica_mesh import make_mesh
    mesh = make_mesh(tuple(jax.devices()))
    w = np.arange(6, dtype=np.float32)
    def tree(last):
        copies = [jax.device_put(w + (i and last), d) for i, d in enumerate(jax.local_devices())]
        where = NamedSharding(mesh.jax_mesh, PartitionSpec())
        return {"w": jax.make_array_from_single_device_arrays(w.shape, where, copies)}
    check_replicas(tree(0), mesh, "verb")
    try:
        check_replicas(tree(rank), mesh, "verb")
    except ValueError as e:
        print("FOUND", e)
    own = w[:4].reshape(2, 2)[rank : rank + 1].repeat(2, 0)
    over = jax.sharding.NamedSharding(mesh.jax_mesh, jax.sharding.PartitionSpec("data"))
    cut = jax.make_array_from_process_local_data(over, own)
    print("HASH", fingerprint({"cut": cut, **tree(0)}).tolist())
"""


@pytest.mark.full
def test_two_processes_raise_the_same_error():
    address = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env.pop("NPROC", None)
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    both = [
        subprocess.Popen(
            [*command, str(i), address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        for i in range(2)
    ]
    try:
        out, err = zip(*(p.communicate(timeout=60) for p in both), strict=True)
    finally:
        for p in both:
            p.kill()
    assert [p.returncode for p in both] == [0, 0], err
    # Gloo's threads write of their connections to the same stream, in the midst of a line as well.
    lines = [re.findall(r"(?:FOUND|HASH) .*", text) for text in out]
    assert lines[0] == lines[1] and len(lines[0]) == 2
    assert re.search(
        r"FOUND jdp.verb: of 1 .*\['w'\] on process 1, CpuDevice\(id=\d+\) is not .* 3 of 4 devices;", out[0]
    )
    whole = np.float32([[0, 1], [0, 1], [2, 3], [2, 3]])
    assert f"HASH {fingerprint([whole, np.arange(6, dtype=np.float32)]).tolist()}" in out[0]
