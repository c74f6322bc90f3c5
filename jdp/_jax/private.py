"""Private names of JAX, jaxlib and Flax that jdp uses all the same, each behind a function or constant.

If a new version drops a name, a feature is lost or becomes slower, and the function here says which; no number changes.
`tests/jax/test_private.py` has a test for each name, which fails if a new version changes it.

1. `jax._src.core.trace_state_clean`: `trace_state_clean`
2. `to_concrete_value` of a tracer: `concrete_value`
3. `_cache_size` of a jitted function: `compilations`
4. `runtime_type` of a device's client: `is_described`
5. `jax._src.distributed.global_state`, and the coordination service's client there: `job`
6. `jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params`: `found_by_cluster`
7. `jax._src.lib._jax`, where two functions of jaxlib get an argument more: `absent_are_named`, `gloo_goes_by`
8. `_nnx_tabulate_id` of an NNX object: `is_tabulated`
9. `__captures__` of an NNX object: `CAPTURES`
10. `jax._src.compilation_cache.get_file_cache`, and `jax._src.compiler._cache_write`: `keep_programs`
11. `_wrapped_callback`, `xla_bridge.backends` and `_backends`: `callbacks`, `starts_backends`, `asked_for_devices`
12. `jax._src.core.pytype_aval_mappings`, which has the type of a `jax._src.array.ArrayImpl`: `arrays_on_its_mesh`
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend

CAPTURES = "__captures__"
"""Where `nnx.capture` keeps what the parts of a module have sown. Without it `nnx.capture` around a wrapped model that
has an `nnx.List` fails in Flax, if Flax cannot sort its own name among the list's numbers by then.

Tried: nothing public says where it is kept; `nnx.capture` itself sets it, and reads it at its end.
"""


def _found(module: str, name: str) -> Any:
    """Returns a module's attribute (the name may have dots); None if this version does not have it."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _missing(name: str, what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"jdp: JAX {jax.__version__} has no {name}, {what}. {instead}")


def is_clean() -> bool:
    """Returns the same as `trace_state_clean`, by public names."""
    return jax.extend.core.get_opaque_trace_state() == _clean_state()


trace_state_clean: Callable[[], bool] = _found("jax._src.core", "trace_state_clean") or is_clean
"""Whether no transformation of JAX is tracing this thread. Without JAX's own function each call is slower.

Tried: `jax.extend.core.get_opaque_trace_state`, compared with that of a thread that traces nothing. It gives
the same answers and takes ten times as long (27 us against 2.5 on a busy machine), so it is the second choice. The
arguments of a call do not tell: a function may close over tracers.
"""


def _clean_state() -> Any:
    states: list[Any] = []
    thread = threading.Thread(target=lambda: states.append(jax.extend.core.get_opaque_trace_state()))
    thread.start()
    thread.join()
    return states[0]


def concrete_value(tracer: Any) -> Any:
    """Returns the array that a tracer of an eager transformation wraps; None under `jit` or `vmap`.

    Without JAX's own method the first call of each program is slower.

    Tried: `jax.extend.core.concrete_or_error`. Under `jit` it writes an error for each tracer, which takes 1.5 ms (a
    model of 100 arrays: 0.15 s), so it is the second choice.
    """
    value = getattr(tracer, "to_concrete_value", None)
    if value is not None:
        return value()
    try:
        return jax.extend.core.concrete_or_error(None, tracer)
    except jax.errors.ConcretizationTypeError:
        return None


def compilations(jitted: Iterable[Any]) -> int | None:
    """Returns how many programs these jitted functions have compiled; None where this version of JAX does not say.

    Without it `jdp.explain` reports no number of compilations.

    Tried: `jax.monitoring` says that something was compiled, and not what; a count in the function's body counts how
    often it was traced, as part of other programs too.
    """
    sizes = [getattr(run, "_cache_size", None) for run in jitted]
    return None if None in sizes else sum(size() for size in sizes if size is not None)


def is_described(device: Any) -> bool:
    """Returns True if the device is one of a topology: programs are compiled for it, and do not run.

    Without it `jdp.topology` raises, and so does `jdp plan` for machines that are not there.

    Tried: `device in jax.devices(device.platform)`. It starts JAX's backends, and mistakes a real device for a
    described one if the name of a plugin is not that of its platform.
    """
    return getattr(device.client, "runtime_type", "") == "compile_only_runtime"


JOB_OF_ONE = types.SimpleNamespace(client=None, process_id=0, num_processes=1, coordinator_address=None)
"""What JAX knows of a job of one process."""


def job() -> Any:
    """Returns what JAX knows of a job, in the form of `JOB_OF_ONE`. Without it jdp runs in one process only.

    Tried: `jax.process_index()` and `jax.process_count()` start the backend, which waits for that of every other
    process. For the keys and values of the coordination service there is nothing public;
    `jax.experimental.multihost_utils` takes its client from here as well.

    Raises:
        NotImplementedError: there are several processes, and this version of JAX has no such record.
    """
    state = _found("jax._src.distributed", "global_state")
    if state is not None:
        return state
    if jax.distributed.is_initialized():
        raise _missing(
            "jax._src.distributed.global_state",
            "through which the processes of a job tell each other what they do",
            "Install a version that has it, or run one process.",
        )
    return JOB_OF_ONE


def found_by_cluster(
    address: str | None,
    count: int | None,
    here: int | None,
    ids: Sequence[int] | None,
    method: str | None,
    seconds: int,
) -> tuple[str | None, int | None, int | None]:
    """Returns where the processes meet, how many they are and which this is, completed by JAX's detection of clusters.

    Without it, `jdp.distributed.initialize` must be told the three, except for what it finds itself (`jdp launch`,
    JAX's variables, torchrun).

    Tried: `jax.distributed.initialize` detects clusters, too. But it raises if there is none, or if JAX has started in
    a job of one process; jdp's `initialize` must do nothing in these cases.

    Raises:
        NotImplementedError: this version of JAX has no such detection. A guess that there is one process would make
            several jobs out of one.
    """
    find = _found("jax._src.clusters", "ClusterEnv.auto_detect_unset_distributed_params")
    if find is None:
        raise _missing(
            "jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params",
            "which tells jdp.distributed.initialize whether a cluster has started other processes",
            "Pass coordinator_address, num_processes and process_id, or num_processes=1 to run alone.",
        )
    address, count, here, _ = find(address, count, here, ids, method, seconds)
    return address, count, here


@contextlib.contextmanager
def absent_are_named(seconds: int) -> Iterator[None]:
    """Makes JAX's coordination service, if it starts in here, wait `seconds` for all processes and name absent ones.

    JAX lets it wait for an hour. Without this, the processes that have come still end when their own time is over, but
    nothing names the absent ones.

    Tried: no argument of `jax.distributed.initialize` leads there.
    """
    undo = _give("get_distributed_runtime_service", cluster_register_timeout=seconds)
    try:
        yield
    finally:
        undo()


def gloo_goes_by(interface: str) -> None:
    """Makes collectives between CPUs use this network interface, if JAX's backend has not started yet.

    JAX leaves it to Gloo, which takes the address that the hostname resolves to. Without this, CPUs of several machines
    find each other only where that is not 127.0.x.1.

    Tried: no option of JAX and no environment variable leads there.
    """
    _give("make_gloo_tcp_collectives", interface=interface)


def _give(name: str, **more: Any) -> Callable[[], None]:
    """Makes JAX call this function of jaxlib with more arguments, if it takes them. Returns a function to undo that."""
    module = _found("jax._src.lib", "_jax")
    call = getattr(module, name, None)
    if call is None:
        return lambda: None

    def with_more(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **more, **kwargs)
        except TypeError:  # it does not take them any more
            return call(*args, **kwargs)

    setattr(module, name, with_more)
    return lambda: setattr(module, name, call)


def is_tabulated(wrapper: Any) -> bool:
    """Returns True if `nnx.tabulate` calls this NNX object, whose methods it has wrapped to describe their arguments.

    Without it `nnx.tabulate(dp, ...)` fails in Flax.

    Tried: nothing public tells a method its caller.
    """
    return hasattr(wrapper, "_nnx_tabulate_id")


def keep_programs(programs: Any, folder: str) -> bool:
    """Makes JAX call `programs.get(key)` before it compiles, and `programs.put(key, data)` after it.

    Returns False if this version of JAX does not allow that: then each start compiles its programs again.

    Tried: JAX's own cache, by its options. It writes into the final file. A process that is killed while it writes
    leaves a damaged file, which JAX reads, with a warning, at every later start. Its files have no checksum: of 30
    flipped bits (with the package zstandard), four ended the process and one gave other numbers. Only process 0 writes.
    On CPU each process has its own keys, so all others compile everything at every start.
    """
    make = _found("jax._src.compilation_cache", "get_file_cache")
    if make is None:
        return False

    def get_file_cache(path: str) -> Any:
        return (programs, path) if path == folder else make(path)  # the user's own folder, which JAX was told later

    module: Any = importlib.import_module("jax._src.compilation_cache")
    module.get_file_cache = get_file_cache
    write = _found("jax._src.compiler", "_cache_write")
    if write is not None:
        # The same function, but every process is process 0 to it.
        alone = types.SimpleNamespace(global_state=JOB_OF_ONE)
        every = types.FunctionType(write.__code__, {**write.__globals__, "distributed": alone}, write.__name__)
        module = importlib.import_module("jax._src.compiler")
        module._cache_write = every
    jax.config.update("jax_compilation_cache_dir", folder)  # otherwise JAX uses no cache
    return True


def callbacks() -> list[types.FrameType]:
    """Returns the frames of callbacks into Python that programs on the devices are running now, one per thread at most.

    Without the name none is found, and processes that wait for a callback that blocks report it only after half an
    hour.

    Tried: nothing public says that a device waits for Python; the output of the program is merely not ready.
    """
    return _running("jax._src.callback", "_wrapped_callback")


def _running(module: str, name: str) -> list[types.FrameType]:
    """Returns the frames of a function, given by its module and name, that runs now; one per thread at most."""
    found = []
    for top in list(sys._current_frames().values()):
        frame: types.FrameType | None = top
        while frame is not None and not (frame.f_code.co_name == name and frame.f_globals.get("__name__") == module):
            frame = frame.f_back
        if frame is not None:
            found.append(frame)
    return found


def starts_backends() -> bool:
    """Returns True if a thread starts JAX's backends now, which ends only when all processes have started theirs.

    Without the name it is False. Then a process that waits for the devices of another one that has ended learns of it
    only after `shutdown_timeout`.

    Tried: nothing public tells; `jax.devices()` starts them itself.
    """
    return bool(_running("jax._src.xla_bridge", "backends"))


def asked_for_devices() -> bool:
    """Returns True if JAX's backends have started, or if a thread starts them now.

    Without the name it is True. Then a process that does not ask for devices is not named in the errors of the others,
    which end after JAX's own two minutes.

    Tried: `xla_bridge.backends_are_initialized` waits until they are.
    """
    backends = _found("jax._src.xla_bridge", "_backends")
    return backends is None or bool(backends) or starts_backends()


@contextlib.contextmanager
def arrays_on_its_mesh() -> Iterator[None]:
    """Lets this thread trace the body of a replica that indexes arrays of another mesh, as if they were on its own.

    If a function closes over such an array, JAX itself casts it to the replica's mesh. But in JAX 0.10 `x[i]` looks at
    the type of `x` before that; without the name, it is an error there.

    Tried: a trace under no mesh, and under one of Auto axes. JAX does not combine the array with those of the replica.
    """
    type_of, kind = _found("jax._src.core", "pytype_aval_mappings"), _found("jax._src.array", "ArrayImpl")
    if not type_of or kind not in type_of:
        yield
        return
    with _lock_of_types:
        if not _tracing:
            type_of[kind] = functools.partial(_type_of, type_of[kind])
        _tracing.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock_of_types:
            _tracing.remove(threading.get_ident())
            if not _tracing:
                type_of[kind] = type_of[kind].args[0]


_tracing: list[int] = []  # the threads in `arrays_on_its_mesh`, once for each time
_lock_of_types = threading.Lock()


def _type_of(of_jax: Callable[[Any], Any], x: Any) -> Any:
    found, mesh = of_jax(x), jax.sharding.get_abstract_mesh()
    had = found.sharding.mesh
    if threading.get_ident() not in _tracing or not mesh.manual_axes or had.empty or had == mesh:
        return found
    return found.update(sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
