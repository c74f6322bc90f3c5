"""DataParallel: `DataParallel(f)(params, *batch) == f(params, *batch)`, on every device."""

from __future__ import annotations

import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypedDict, TypeVar, Unpack, cast, overload

import jax
from flax import linen, nnx
from jax.sharding import Mesh

from .._core.devices import Device, DeviceLike, Devices, named_once, names_of
from .._core.fingerprint import check_replicas
from .._core.inputs import flatten_batch
from .._core.layout import Tree
from .._core.parallel_apply import in_replica
from .._core.replica_mesh import outside_of_mesh
from .._core.replicate import broadcast, refuse_freed_in, sharded
from .._core.summary import bytes_on_each, page_of
from .._jax.private import is_tabulated
from .._model import linen as _linen
from .._model import nnx as _nnx
from .._model.config import Config, is_training, kind_of
from .._page import Page, in_bytes, in_notebook
from .._train.parallel import parallel
from .._train.train_step import train_step
from .._train.value_and_grad import grad, value_and_grad
from .batches import batches
from .evaluate import evaluate
from .forward import apply, gather_outputs, replicate_parameters, run_module, run_nnx, scatter_arguments
from .prefetch import prefetch
from .torch_names import INSTEAD, OWNERS, TORCHS

M = TypeVar("M")


class WrapperArguments(TypedDict, total=False):
    """The further keywords of `DataParallel`; both of its types take them."""

    in_axes: Tree
    out_axes: Tree
    axis_name: str
    reduce_state: Literal["primary", "mean"]
    state_axes: Mapping[Any, int] | None
    replicas: int | None
    device_ids: Devices


_NO_INIT = (
    "jdp.DataParallel: init is for Linen modules, and this wraps none; nothing is left to initialise. Call dp(*args) "
    "for NNX, dp(params, *args) for a function."
)

_NO_PARAMS = (
    "jdp.DataParallel: dp() is called without the parameters, which are its first argument; a wrapper of a function or "
    "of a Linen module holds none. Call dp(params, *args); with Linen dp(variables, *args)."
)

_NOT_TRAINED = (
    "jdp.DataParallel: the loss of dp.train_step calls dp itself, whose parameters are constants there; nothing is "
    "trained. Call the model that the loss is given, lambda model, batch: model(x), and for outputs without a gradient "
    "jax.lax.stop_gradient(model(x))."
)


class OwnSignature:
    """The signature that `inspect.signature` shows for a class: its `__init__`'s, which `nnx.Module` would hide."""

    def __get__(self, wrapper: object, kind: type) -> inspect.Signature:
        if wrapper is not None:  # a wrapper itself has the signature of its `__call__`
            raise AttributeError("__signature__", name="__signature__", obj=wrapper)
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def _has(module: Any, name: str) -> bool:
    """Returns True if a module has an attribute. The value is not read: some of Linen's raise errors if unbound."""
    return hasattr(type(module), name) or name in getattr(module, "__dict__", ()) or _is_set_up(module, name)


def _is_set_up(module: Any, name: str) -> bool:
    """Returns True if the `setup` of a Linen module names an attribute, which the module has once it is bound."""
    if not isinstance(module, linen.Module):
        return False
    steps = dis.get_instructions(inspect.unwrap(type(module).setup))
    return any(step.opname == "STORE_ATTR" and step.argval == name for step in steps)


class DataParallel(nnx.Module, Generic[M]):
    """Runs a module on every device, each with its chunk of the batch: `dp(params, x) == module(params, x)`.

    Flax Linen: `dp = jdp.DataParallel(model)`, `variables = dp.init(key, x)`, then `dp(variables, x)`. A function:
    `dp(params, x)`. Flax NNX: `dp(x)`; `dp.module` is the model, updated in place. To train:
    `dp.train_step(loss_fn, tx)`. To evaluate: `dp.evaluate(metrics_fn, variables, batches)`.

    The batch is cut along `dim` by `torch.chunk`'s rule, the parameters are replicated, all replicas
    run as one SPMD program, and the outputs are concatenated in input order. Any number of rows
    works, and is compiled once. `jax.grad` through a call gives the sum over replicas, which is the
    gradient of the whole batch.

    For Linen, `dp.apply(variables, x)` is the same as `dp(variables, x)`. For NNX the wrapper is an NNX module itself
    (`nnx.jit`, `nnx.value_and_grad`, `nnx.Optimizer(dp, tx, wrt=nnx.Param)`).

    Over several processes (`jdp.distributed.initialize`) each passes its own rows, any number of them, and gets its
    own outputs; parameters, gradients, losses and state are those of all. All make the same calls in the same order.

    Programs are kept for the 128 batch sizes used last, by each entry point (a call, `value_and_grad`, a step);
    one that was dropped is compiled again.

    `scatter`, `replicate`, `parallel_apply` and `gather` are methods that a subclass may replace.
    Inside another replica's program (a wrapper in a wrapper, `jax.pmap`, `jax.shard_map`) the module
    runs directly. Under `jax.jit` and the like, parameters should be replicated (as `dp.init` returns
    them) or uncommitted: JAX refuses arrays that are committed to a single device there.

    Args:
        module: a Linen module, an NNX module, or a function `apply_fn(params, *args, **kwargs)`.
        devices: `jax.Device`s, ints (indices into `jax.devices()`) or strings (`"gpu:0"`); the first
            is the primary device. `None` is all of `jax.devices()`. A `jax.sharding.Mesh` of one axis stands for its
            devices, and its axis for `axis_name`. In a mesh with several, `axis_name` counts the replicas, and each
            replica is the devices along the others, over which XLA partitions it as under `jax.jit`: parameters keep
            the `NamedSharding` over these that they have (or that `nn.with_partitioning`, logical axis rules or NNX
            metadata give them), and constraints on these axes hold. `docs/mesh.md` says when that pays.
        output_device: where outputs go: a device, `"cpu"` or -1 (the host's CPU), or `"sharded"`
            (one array over the replicas). `None` is where the parameters live: the primary device
            for parameters there or on the host, over the replicas for replicated ones. With several processes,
            each has its outputs on its own devices: a device of another process stands for its counterpart here,
            and the primary device is the first of its own.
        dim: the axis along which inputs are cut and outputs concatenated, negative allowed.
        in_axes: as in `jax.vmap`, of the positional arguments after the parameters: an int, or a
            tuple with an int or None (replicated) for each. Default: `dim` for all.
        out_axes: as in `jax.vmap`, of the outputs; None in it is the primary replica's. Default: `dim`.
        axis_name: the name of the axis inside the program, for `BatchNorm(axis_name=...)` and
            collectives of your own; in a mesh, the axis that counts the replicas.
        reduce_state: which replica's state update is kept: `"primary"` as in torch, or `"mean"`,
            weighted by rows.
            State that the call itself creates has no value from before: a float is then an error, unless it is 0-d and
            the mean is kept, or `state_axes` names it, or it is sown as an intermediate.
        state_axes: collections with a batch axis, as `{"cache": 0}`: cut and gathered like the batch. NNX: any
            filter is a key (a variable type, its name, `nnx.PathContains("k")`); the first that matches counts.
        replicas: the number of replicas, if it should be the same on any hardware: the batch is cut into that
            many chunks, and the number of devices (of all processes together) divides it. A device runs its replicas
            one after the other. Chunk sizes, dropout masks, statistics and state are those of that many devices. `None`
            is one for each device. `docs/replicas.md` says what it costs, and which rows each process must pass.
        shard_params: for NNX, cuts the parameters over the devices, each along an axis that they divide; they are
            gathered as they are used. `module` may be a function that makes it, `lambda: Net(rngs=nnx.Rngs(0))`: each
            part is then made where it lives, and no device, nor the host, ever holds all. (For Linen
            `dp.init(..., shard_params=True)`; functions take parameters that are cut.)
        device_ids: torch's name of `devices`.

    Raises:
        ValueError: devices are empty, duplicate, unknown or of several platforms, or do not divide `replicas`; a mesh
            of several axes without `axis_name`, or together with `replicas` or `shard_params`.
        TypeError: `module` is none of the three (a torch module, a callable pytree that holds arrays).

    Example:
        >>> import flax.linen as nn, jax, jdp, numpy as np
        >>> dp = jdp.DataParallel(nn.Dense(3), devices=[0])
        >>> x = np.ones((5, 2), np.float32)
        >>> variables = dp.init(jax.random.key(0), x)
        >>> dp.apply(variables, x).shape
        (5, 3)

    Source: `DataParallel` in torch/nn/parallel/data_parallel.py.
    """

    @overload
    def __init__(
        self,
        module: Callable[[], M],
        devices: Devices = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        shard_params: Literal[True],
        **options: Unpack[WrapperArguments],
    ) -> None: ...
    @overload
    def __init__(
        self,
        module: M,
        devices: Devices = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        shard_params: bool = False,
        **options: Unpack[WrapperArguments],
    ) -> None: ...
    def __init__(
        self,
        module: Any,
        devices: Devices = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        in_axes: Tree = None,
        out_axes: Tree = None,
        axis_name: str = "data",
        reduce_state: Literal["primary", "mean"] = "primary",
        state_axes: Mapping[Any, int] | None = None,
        replicas: int | None = None,
        shard_params: bool = False,
        device_ids: Devices = None,
    ) -> None:
        devices = named_once("DataParallel", devices, device_ids)
        kind = "nnx" if shard_params else kind_of(module)
        options = in_axes, out_axes, axis_name, reduce_state, state_axes, shard_params, replicas
        self._config = Config(kind, devices, output_device, dim, *options)
        self.module: M = _nnx.made_in_shards(module, self._config.mesh) if shard_params else module
        if self._config.kind == "nnx":
            # Asked before the state is moved: what comes from one device is the same everywhere afterwards, unless
            # each process copies its own.
            places = [getattr(x, "sharding", None) for x in jax.tree.leaves(nnx.state(self.module))]
            self._put_state()
            is_everywhere = any(place is not None and len(place.device_set) > 1 for place in places)
            if self._config.mesh.spans_processes or is_everywhere:
                self.check_replicas()

    __signature__: ClassVar[OwnSignature] = OwnSignature()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the replicas; the first is the primary device."""
        return self._config.devices

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices, with Auto axes: `axis_name` counts the replicas; others lie inside of a replica."""
        return self._config.mesh.jax_mesh

    @property
    def output_device(self) -> Device | str | None:
        """Where outputs go; None is where the parameters live."""
        return self._config.output_device

    @property
    def dim(self) -> int:
        """The axis along which inputs are cut and outputs concatenated."""
        return self._config.dim

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. Linen: `dp(variables, *args)`; functions: `dp(params, *args)`; NNX: `dp(*args)`.

        Example:
            >>> import jdp, numpy as np
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), devices=[0])
            >>> dp(np.ones((5, 2), np.float32)).shape
            (5, 3)
        """
        if self._config.kind != "nnx":
            if not args:
                raise TypeError(_NO_PARAMS)
            return self.apply(*args, **kwargs)
        if in_replica() or is_tabulated(self):
            if is_training(self._config):
                raise TypeError(_NOT_TRAINED)
            return cast(Any, self.module)(*args, **kwargs)
        with _nnx.sorted_captures(self.module):
            return run_nnx(self, args, kwargs)

    apply = apply
    scatter = scatter_arguments
    replicate = replicate_parameters
    parallel_apply = run_module
    gather = gather_outputs
    value_and_grad = value_and_grad
    grad = grad
    train_step = train_step
    evaluate = evaluate
    parallel = parallel
    prefetch = prefetch
    batches = batches

    def check_replicas(self, tree: Tree = None) -> None:
        """Compares the replicas of a tree bit for bit, on the devices: `dp.check_replicas(state)`, which raises.

        JAX does not notice if copies of a replicated array differ: after a fault of a device, or with several
        processes that did not start alike. Leaves that are cut, or on one device, have no copies to compare. With
        several processes all make this call. `train_step(..., check_replicas=100)` makes it every 100 steps.

        Args:
            tree: parameters, a `jdp.TrainState`, ...; None is the state of an NNX module.

        Raises:
            ValueError: some differ; names the leaves, and for each the processes and devices.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
            >>> dp.check_replicas(jdp.replicate({"w": np.ones(3)}, devices=[0]))

        Source: `_verify_param_shape_across_processes` in torch/nn/parallel/distributed.py, which compares shapes.
        """
        if tree is None:
            if self._config.kind != "nnx":
                raise TypeError(
                    "jdp.check_replicas: tree is missing; only an NNX module holds its own state. Pass the variables."
                )
            tree = nnx.state(self.module)
        refuse_freed_in(tree, flatten_batch(tree, "check_replicas", "tree", stop=None)[0], "check_replicas", "")
        check_replicas(tree, self._config.mesh, "check_replicas")

    @property
    def init(self) -> Callable[..., Tree]:
        """Initialises a Linen module: `dp.init(rngs, *args, **kwargs)`, the bare model's own tree, replicated.

        The tree is that of `module.init` (no `module.` prefix: a checkpoint of the model loads in the
        wrapper and back), with the same numbers, replicated. With `shard_params=True` the parameters are
        cut over the devices, and each part is made where it lives: no device ever holds all of them.

        Example:
            >>> import flax.linen as nn, jax, jdp, numpy as np
            >>> dp = jdp.DataParallel(nn.Dense(3), devices=[0])
            >>> variables = dp.init(jax.random.key(0), np.ones((1, 2), np.float32))
            >>> jax.tree.map(np.shape, variables)
            {'params': {'bias': (3,), 'kernel': (2, 3)}}
        """
        if self._config.kind != "linen":
            raise AttributeError(_NO_INIT)  # then Python calls __getattr__, which raises the error that the user sees
        return self._init

    @outside_of_mesh
    def _init(self, rngs: Tree, *args: Any, shard_params: bool = False, **kwargs: Any) -> Tree:
        config = self._config
        config.refuse_grouped("init", shard_params=shard_params)
        if shard_params or config.mesh.inner_axes:
            return _linen.init_as_program(self.module, config.axis_name, config.mesh, rngs, args, kwargs)
        variables = _linen.init(self.module, config.axis_name, config.mesh, rngs, args, kwargs)
        variables = _linen.place(variables, config.mesh)
        if config.mesh.spans_processes:  # each process has made its own
            check_replicas(variables, config.mesh, "init")
        return variables

    def train(self, **attributes: Any) -> Any:
        """Sets training mode in an NNX module, `dp.train()`, as `nnx.Module.train` does; a Linen module has no mode.

        Example:
            >>> import jdp
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)), devices=[0])
            >>> dp.train()
            >>> dp.module.deterministic
            False
        """
        self._needs_nnx("train")
        return super().train(**attributes)

    def eval(self, **attributes: Any) -> Any:
        """Sets evaluation mode in an NNX module, `dp.eval()`, as `nnx.Module.eval` does; a Linen module has no mode.

        Example:
            >>> import jdp
            >>> from flax import nnx
            >>> dp = jdp.DataParallel(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), devices=[0])
            >>> dp.eval()
            >>> dp.module.deterministic
            True
        """
        self._needs_nnx("eval")
        return super().eval(**attributes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._config.kind == "nnx":  # unpickled arrays are on the default device
            self._put_state()

    @outside_of_mesh
    def _put_state(self) -> None:
        """Puts the state of an NNX module where it belongs: on all devices, or cut over them."""
        mesh, state = self._config.mesh, nnx.state(self.module)
        if self._config.shard_params:
            params, state = nnx.split_state(state, nnx.Param, ...)
            nnx.update(self.module, sharded(params, mesh, "DataParallel"))
        if mesh.inner_axes:
            state = _nnx.put_annotated(state, mesh)
        nnx.update(self.module, broadcast(state, mesh, "DataParallel", cut="kept", comes_back=True))

    def _needs_nnx(self, method: str) -> None:
        if self._config.kind != "nnx":
            raise TypeError(
                f"jdp.DataParallel: {method}() sets the mode of an NNX module, and this wraps none; it would do "
                f"nothing. Pass the mode as an argument, dp.apply(variables, x, train={method == 'train'})."
            )

    if not TYPE_CHECKING:  # with __getattr__, a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raises an `AttributeError`; for a name of torch's it says what to call instead."""
            if name == "init":
                raise AttributeError(_NO_INIT, name=name, obj=self)
            made = "_config" in vars(self)  # not before `__init__` has set it, or while a copy is made
            has = made and not name.startswith("_") and _has(self.module, name)
            if made and not has and name in INSTEAD:
                rule, others, of_nnx = INSTEAD[name]
                raise AttributeError(
                    f"jdp.DataParallel: .{name} is {OWNERS.get(name, TORCHS)}; {rule}. "
                    f"{of_nnx if self._config.kind == 'nnx' else others}."
                )
            way = f"; its module has one. Read dp.module.{name}" if has else ""
            of_linen = getattr(linen.Module, name, None) if has and self._config.kind == "linen" else None
            if isinstance(of_linen, property) or has and _is_set_up(self.module, name):
                way = f"; its module has one once it is bound. Read dp.module.bind(variables).{name}"
            elif callable(of_linen):
                way = f"; its module has one, which is Flax's own. Call dp.module.{name}(...)"
            elif has and self._config.kind != "function" and callable(getattr(type(self.module), name, None)):
                runs = f"jdp.DataParallel(lambda model, x: model.{name}(x), devices)(dp.module, x)"
                runs = runs if self._config.kind == "nnx" else f"dp.apply(variables, x, method={name!r})"
                way = f"; its module has one. Call {runs}, or dp.module.{name} on one device"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{way}")

    def __repr__(self) -> str:
        devices = ", ".join(str(d) for d in self.devices)
        return f"DataParallel(\n{textwrap.indent(f'(module): {self.module!r}', '  ')}\n  (devices): {devices}\n)"

    __str__ = __repr__

    @in_notebook
    def _repr_html_(self) -> Page:
        devices, more = self.devices, f" and {len(self.devices) - 8} more" * (len(self.devices) > 8)
        name = getattr(self.module, "__qualname__", type(self.module).__qualname__)
        facts: list[tuple[str, object]] = [("model", name), ("devices", f"{names_of(devices[:8])}{more}")]
        facts.append(("replicas", self._config.replicas or self._config.mesh.size))
        if self._config.kind != "nnx":
            facts.append(("parameters", "not held here: each call takes them"))
            return page_of(f"DataParallel of {name}", facts, {})
        params, others = map(nnx.as_pure, nnx.split_state(nnx.state(self.module), nnx.Param, ...))
        numbers = sum(x.size for x in jax.tree.leaves(params))
        facts.append(("parameters", f"{numbers:,}, {in_bytes(bytes_on_each(params))} on each device"))
        return page_of(f"DataParallel of {name}", facts, {"parameters": params, "other state": others})
