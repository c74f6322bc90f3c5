"""DataParallel: `DataParallel(f)(params, *batch) == f(params, *batch)`, on every device."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypedDict, TypeVar, Unpack, cast, overload

import jax
from flax import nnx
from jax.sharding import Mesh

from .._core.calls import Ran
from .._core.devices import Device, DeviceLike, Devices, named_once, names_of, resolve_output
from .._core.fingerprint import check_replicas
from .._core.gather import gather, join, scatter_list
from .._core.inputs import entries
from .._core.layout import Tree
from .._core.outline import bytes_on_each, page_of
from .._core.parallel_apply import in_replica
from .._core.programs import dispatch
from .._core.replica_mesh import outside_of_mesh
from .._core.replicate import broadcast, lives_replicated, sharded
from .._core.scatter import Cutting, refuse_other_replicas, split
from .._core.scattered import Scattered, children, holds_scattered, map_scattered, on_mesh
from .._core.unread import unread
from .._jax.private import is_tabulated
from .._model import linen as _linen
from .._model import nnx as _nnx
from .._model.config import Config, kind_of
from .._model.nnx import Held
from .._page import Page, in_bytes, in_notebook
from .._train.parallel import parallel
from .._train.train_step import train_step
from .._train.value_and_grad import grad, value_and_grad
from .batches import batches
from .evaluate import evaluate
from .prefetch import prefetch
from .torch_names import INSTEAD

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


_NO_APPLY = (
    "jdp.DataParallel: an NNX module holds its own state. Call dp(*args) instead of dp.apply; another method runs by "
    "jdp.DataParallel(lambda model, x: model.encode(x), devices)(dp.module, x)."
)


_NO_INIT = (
    "jdp.DataParallel: init is for Linen modules, and this wraps none; nothing is left to initialise. Call dp(*args) "
    "for NNX, dp(params, *args) for a function."
)


class OwnSignature:
    """What `inspect.signature` shows of a class: that of its `__init__`, which `nnx.Module`'s metaclass hides."""

    def __get__(self, wrapper: object, kind: type) -> inspect.Signature:
        if wrapper is not None:  # that of a call
            raise AttributeError("__signature__", name="__signature__", obj=wrapper)
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


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

    Programs are kept for the 128 batch sizes used last, at each door (a call, `value_and_grad`, a step, `parallel`);
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
            tuple with an int or None (whole to every replica) for each. Default: `dim` for all.
        out_axes: as in `jax.vmap`, of the outputs; None in it is the primary replica's. Default: `dim`.
        axis_name: the name of the axis inside the program, for `BatchNorm(axis_name=...)` and
            collectives of your own; in a mesh, the axis that counts the replicas.
        reduce_state: which replica's state update is kept: `"primary"` as in torch, or `"mean"`,
            weighted by rows.
            What a call makes has no value from before: a float is then an error, unless it is 0-d and the mean
            is kept, or `state_axes` names it, or it is sown as an intermediate.
        state_axes: collections with a batch axis, as `{"cache": 0}`: cut and gathered like the batch. NNX: any
            filter is a key (a variable type, its name, `nnx.PathContains("k")`); the first that matches counts.
        replicas: the number of replicas, if it should be the same on any hardware: the batch is cut into that
            many chunks, and the number of devices (of all processes together) divides it. A device runs its replicas
            one after the other. Sizes, masks, statistics and state are those of as many devices. `None` is one for
            each device. `docs/replicas.md` says what it costs, and which rows each of several processes passes.
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
            mesh, state = self._config.mesh, nnx.state(self.module)
            self._put_state()
            # What was copied from one device just now is one value, unless each process copied its own.
            places = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
            if mesh.spans_processes or any(place is not None and len(place.device_set) > 1 for place in places):
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
            return self.apply(*args, **kwargs)
        if in_replica() or is_tabulated(self):
            return cast(Any, self.module)(*args, **kwargs)
        with _nnx.sorted_captures(self.module):
            return self._run_nnx(args, kwargs)

    @outside_of_mesh
    def apply(self, variables: Tree, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a Linen module or a function: `dp.apply(variables, x) == module.apply(variables, x)`.

        For Linen modules `rngs`, `mutable` and `method` are those of `flax.linen.Module.apply`; with
        `mutable` the result is `(output, updated collections)`. Each replica draws from its own keys,
        the primary from those given.

        Args:
            variables: the variables of a Linen module (from `dp.init`), or a function's parameters.
            *args: cut along `dim` (or `in_axes`). NNX objects (an `nnx.Rngs`, a model) go whole to every replica, and
                their state is updated.
            **kwargs: as `args`; also `rngs`, `mutable` and `method` for Linen.

        Raises:
            ValueError: arrays disagree on the batch size; uneven chunks for a model with collectives.
            RuntimeError: parameters on a device that is neither the host nor the primary device.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> dp.apply(np.float32(2), np.arange(3.0)).tolist()
            [0.0, 2.0, 4.0]
        """
        config, stateful = self._config, False
        if config.kind == "nnx":
            raise TypeError(_NO_APPLY)
        if config.kind == "linen":
            kwargs, stateful = _linen.call_options(variables, kwargs)
        of_objects = type(variables) is not dict and _nnx.is_node(variables)
        own = self._takes_own_steps and not of_objects
        found = config.calls.again(config.mesh, self.module, variables, args, kwargs) if own else None
        if found is not None:
            return self._gathered(*found, stateful)
        if in_replica():
            module = cast(Any, self.module)
            if config.kind == "linen":
                return module.apply(_linen.unboxed(variables, kwargs.get("mutable", False)), *args, **kwargs)
            return module(variables, *args, **kwargs)
        cut = {
            name: self._cut(variables[name], axis, f"state {name}")
            for name, axis in config.state_axes.items()
            if name in variables
        }
        if cut:
            variables = {**variables, **cut}
        # Parameters of a function may hold NNX objects. Such a call is never a known one.
        takes = config.kind == "function"
        whole, nodes = _nnx.take_nodes(variables, root="params") if takes else (variables, [])
        (args, kwargs), given = _nnx.take_nodes((args, kwargs), len(nodes))
        nodes += given
        if nodes:  # a model, an nnx.Rngs: replicated, and updated
            graph, *states = nnx.split(nodes)
            whole = Held(whole, graph, tuple(states))
        try:
            out = self._forward(whole, args, kwargs, stateful, cut, variables if nodes else None)
        except Exception as error:
            _linen.explain_stacked(error, variables, len(config.devices))
            raise
        if nodes:
            out, updates = out
            nnx.update(nodes, updates)
        return out

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Devices
    ) -> tuple[Scattered, Scattered]:
        """Cuts the arguments into chunks, step one: `inputs, kw = dp.scatter((x,), {}, dp.devices)`.

        A subclass may replace it, to cut its own kind of batches.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> inputs, kw = dp.scatter((np.arange(3.0),), {}, dp.devices)
            >>> inputs.sizes, inputs[0][0].tolist()
            ((3,), [0.0, 1.0, 2.0])
        """
        config = self._config
        axes = None
        if config.in_axes is not None:
            in_axes = entries("DataParallel", config.in_axes, len(inputs), "in_axes", "arguments")
            axes = (tuple(in_axes), config.dim)
        own = devices is config.devices
        mesh, layouts = (config.mesh, config.layouts) if own else (config.mesh_of(devices), None)
        roots = ("args", "kwargs")
        how = Cutting(mesh, config.dim, "DataParallel", roots, axes=axes, layouts=layouts, place=False)
        how = how._replace(replicas=config.replicas)
        args, kw = children(split((tuple(inputs), dict(kwargs)), how))
        return args, kw

    def replicate(self, tree: Tree, devices: Devices) -> Tree:
        """Replicates the parameters, step two: `dp.replicate(params, dp.devices)`. Those in place stay as they are.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> float(dp.replicate(np.float32(2), dp.devices))
            2.0
        """
        config = self._config
        mesh = config.mesh if devices is config.devices else config.mesh_of(devices)
        return broadcast(tree, mesh, "DataParallel")

    def parallel_apply(self, replicas: Tree, inputs: Scattered, kwargs: Scattered) -> Scattered:
        """Runs the module on every replica, as one program, step three: `dp.parallel_apply(replicas, inputs, kw)`.

        `inputs` and `kwargs` come from `scatter`; lists with one tree per device, as in torch, will do.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> inputs, kw = dp.scatter((np.arange(3.0),), {}, dp.devices)
            >>> dp.parallel_apply(dp.replicate(2.0, dp.devices), inputs, kw)[0].tolist()
            [0.0, 2.0, 4.0]
        """
        config = self._config
        if not isinstance(inputs, Scattered):
            inputs = scatter_list(inputs, config.mesh, config.dim, "inputs", config.replicas)
        if not isinstance(kwargs, Scattered):
            kwargs = scatter_list(kwargs or [{}], config.mesh, config.dim, "kwargs", config.replicas)
        mesh = config.mesh
        inputs, kwargs = (s if s._layout.mesh is mesh else on_mesh(s, mesh) for s in (inputs, kwargs))
        if inputs._layout.mesh is mesh:
            refuse_other_replicas(inputs, Cutting(mesh, config.dim, "DataParallel", "inputs", replicas=config.replicas))
        program = config.program(self.module, type(replicas) is Held)
        return dispatch(program, inputs._layout.mesh, replicas, inputs, kwargs)

    def gather(self, outputs: Scattered, output_device: Device | str | None) -> Tree:
        """Concatenates the outputs on the output device, step four: `dp.gather(outputs, dp.output_device)`.

        Example:
            >>> import jdp, numpy as np
            >>> dp = jdp.DataParallel(lambda w, x: x * w, devices=[0])
            >>> inputs, kw = dp.scatter((np.arange(3.0),), {}, dp.devices)
            >>> outputs = dp.parallel_apply(dp.replicate(2.0, dp.devices), inputs, kw)
            >>> dp.gather(outputs, dp.output_device).tolist()
            [0.0, 2.0, 4.0]
        """
        if output_device not in (None, "sharded"):
            output_device = resolve_output("DataParallel", output_device)
        if isinstance(outputs, Scattered):
            return join(outputs, output_device)
        if holds_scattered(outputs):  # a batch, each array of which has its own axis
            return map_scattered(lambda s: join(s, output_device), outputs)
        return gather(outputs, output_device, self._config.dim)

    value_and_grad = value_and_grad
    grad = grad
    train_step = train_step
    evaluate = evaluate
    parallel = parallel
    prefetch = prefetch
    batches = batches

    def check_replicas(self, tree: Tree = None) -> None:
        """Compares the replicas of a tree bit for bit, in the devices: `dp.check_replicas(state)`, which raises.

        JAX does not notice where copies of a replicated array differ: after a fault of a device, or with several
        processes that did not start alike. Leaves that are cut, or on one device, have no copies to compare. With
        several processes all make this call. `train_step(..., check_replicas=100)` does it on the way.

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
            raise AttributeError(_NO_INIT)  # upon which Python asks __getattr__, whose error is the user's
        return self._init

    @outside_of_mesh
    def _init(self, rngs: Tree, *args: Any, shard_params: bool = False, **kwargs: Any) -> Tree:
        config = self._config
        config.refuse_grouped("init", shard_params=shard_params)
        if shard_params or config.mesh.inner_axes:
            return _linen.init_as_program(self.module, config.axis_name, config.mesh, rngs, args, kwargs)
        variables = _linen.init(self.module, config.axis_name, rngs, args, kwargs)
        variables = _linen.place(variables, config.mesh)
        if self._config.mesh.spans_processes:  # each has made its own
            check_replicas(variables, self._config.mesh, "init")
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
        if self._config.kind == "nnx":  # pickled arrays forget where they were
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
        nnx.update(self.module, broadcast(state, mesh, "DataParallel", cut="kept"))

    @outside_of_mesh
    def _run_nnx(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        config = self._config
        filters = _nnx.filters_of(config.state_axes)
        # Arguments that are NNX objects (an nnx.Rngs) are split and updated with the module.
        (args, kwargs), given = _nnx.take_nodes((args, kwargs), 1)
        nodes = [self.module, *given]
        graph, *batched, sown, rest = nnx.split(nodes, *[accepts for accepts, _ in filters], nnx.Intermediate, ...)
        cut = {
            f"{kind}": self._cut(state, axis, "state")
            for state, (kind, axis) in zip(batched, config.state_axes.items(), strict=True)
        }
        sown = _linen.place(sown, config.mesh)  # it came back cut, like an output
        params = Held(_nnx.StandIn(0), graph, (*cut.values(), sown, rest))
        out, updates = self._forward(params, args, kwargs, stateful=False, cut=cut, home=rest.get(0, ()))
        nnx.update(nodes, updates)
        return out

    def _forward(
        self,
        params: Tree,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stateful: bool,
        cut: Mapping[str, Scattered],
        home: Tree = None,
    ) -> Any:
        """Runs the four steps. With parameters and NNX objects it returns the result, and the updates of the objects.

        `stateful`: the program returns (output, state). `cut`: the state with a batch axis, by name. `home`: what of
        the parameters tells where results go, if not all of them do.
        """
        self._config.refuse_other_mesh()
        inputs, kw = self.scatter(args, kwargs, self.devices)
        _refuse_other_rows(cut, inputs, kw)
        replicas = self.replicate(params, self.devices)
        run, own = lambda rows: self.parallel_apply(replicas, rows, kw), self._takes_own_steps
        outputs = unread(run, inputs, self._config.calls.reads) if own and inputs._layout.holds_statics else run(inputs)
        in_place, beside = replicas is params, type(params) is Held
        config = self._config
        # (With state_axes some of the variables may have to be cut, another time.)
        if in_place and not config.state_axes and not beside and own:
            call, operands = (params, args, kwargs), (replicas, inputs, kw)
            config.calls.remember(lambda: config.program(self.module), self.module, call, operands)
        stay = self._stays(params, params if home is None else home, in_place)
        if not beside:
            return self._gather(outputs, stay, stateful)
        outputs, updates = children(outputs)
        return self._gather(outputs, stay, stateful), join(updates, "sharded" if stay else None)

    @property
    def _takes_own_steps(self) -> bool:
        """Whether the four steps are these, and no subclass's."""
        kind = type(self)
        steps = kind.scatter, kind.replicate, kind.parallel_apply, kind.gather
        return steps == _STEPS and _NAMES.isdisjoint(vars(self))

    def _stays(self, params: Tree, home: Tree, in_place: bool) -> bool:
        """Returns True if results stay over the replicas, because they come back where the parameters live."""
        if in_place:
            return bool(jax.tree.leaves(params))
        return not jax.tree.leaves(home) or lives_replicated(home, self._config.mesh)

    def _gathered(self, ran: Ran, out: tuple[Any, ...], stateful: bool) -> Any:
        """Returns the result of a call that is known, whose parameters are replicated."""
        if ran.program.layout(out).is_gathered and self._config.output_device in (None, "sharded"):
            return out[-1]
        return self._gather(ran.program.scattered(out), True, stateful)

    def _gather(self, outputs: Scattered, stay: bool, stateful: bool) -> Any:
        """Runs the last step, and returns the output where the user wants it, the state where the parameters live."""
        home = "sharded" if stay else None
        device = home if self.output_device is None else self.output_device
        if not stateful:
            return self.gather(outputs, device)
        out, state = children(outputs)
        return self.gather(out, device), join(state, home)

    def _cut(self, state: Tree, axis: Any, name: Any) -> Scattered:
        """Cuts state with a batch axis like the batch."""
        config = self._config
        how = Cutting(config.mesh, config.dim, "DataParallel", name, axes=axis, replicas=config.replicas)
        return split(state, how)

    def _needs_nnx(self, method: str) -> None:
        if self._config.kind != "nnx":
            raise TypeError(
                f"jdp.DataParallel: {method}() sets the mode of an NNX module, and this wraps none; it would do "
                f"nothing. Pass the mode as an argument, dp.apply(variables, x, train={method == 'train'})."
            )

    if not TYPE_CHECKING:  # to which every name would be known then

        def __getattr__(self, name: str) -> Any:
            """Raises an `AttributeError`; for a name of torch's it says what to call instead."""
            if name == "init":
                raise AttributeError(_NO_INIT, name=name, obj=self)
            if name not in INSTEAD or "_config" not in vars(self):
                has = "_config" in vars(self) and not name.startswith("_") and hasattr(self.module, name)
                way = f"; its module has one. Read dp.module.{name}" if has else ""
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{way}")
            rule, others, of_nnx = INSTEAD[name]
            raise AttributeError(
                f"jdp.DataParallel: .{name} is torch's; {rule}. {of_nnx if self._config.kind == 'nnx' else others}."
            )

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


_STEPS = DataParallel.scatter, DataParallel.replicate, DataParallel.parallel_apply, DataParallel.gather
_NAMES = {step.__name__ for step in _STEPS}


def _refuse_other_rows(cut: Mapping[str, Scattered], inputs: Any, kw: Any) -> None:
    """Raises a `ValueError` for state with a batch axis that has other rows than the batch."""
    if not isinstance(inputs, Scattered) or not isinstance(kw, Scattered):
        return  # of a subclass's scatter
    for name, state in cut.items():
        batched = inputs._layout.is_cut or kw._layout.is_cut
        if batched and state._layout.is_cut and state.sizes != inputs.sizes:
            raise ValueError(
                f"jdp.DataParallel: state {name} has {sum(state.sizes)} rows, the batch has {sum(inputs.sizes)}; "
                f"state with a batch axis is cut like the batch. Pass state of that many rows."
            )
