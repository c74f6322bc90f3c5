"""evaluate computes the metrics of a whole data set; they do not depend on the batches or the number of devices."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core.gather import join
from .._core.layout import Tree, is_key
from .._core.outputs import Marked, paths_in
from .._core.parallel_apply import CallOf, on_replicas
from .._core.programs import ReplicaProgram, capturing, dispatch, made_once
from .._core.replica_mesh import outside_of_mesh
from .._core.replicate import broadcast
from .._core.scatter import Cutting, split
from .._core.scattered import Scattered, Signature, children
from .._core.unread import Reads, unread
from .._jax.private import trace_state_clean
from .._model.config import Config, Wrapper, axes_of_batch
from .._model.nnx import enter, in_evaluation, put_nodes, take_nodes
from .._train.forms import Form, Forms
from .._train.gradients import Loss, forms_of, run_loss
from .._train.loss import Roles, assign_roles, loss_of
from .._train.state import TrainState
from .._train.terms import described
from .batches import Batches
from .prefetch import Prefetched, prefetch, refuse_one_batch

VERB = "evaluate"
_IN_FLIGHT = 2  # at most so many batches run, or wait for the host to read their results


@outside_of_mesh
def evaluate(dp: Wrapper[object], metrics_fn: Callable[..., Mapping[str, Any]], /, *arguments: Any) -> dict[str, Any]:
    """Runs a whole data set and returns its metrics: `dp.evaluate(metrics_fn, variables, batches)`.

    `metrics_fn(variables, batch)` returns a dict, as `{"accuracy": (logits.argmax(-1) == labels).mean()}`. For NNX:
    `dp.evaluate(metrics_fn, batches)`, and the function gets the model.

    Each is the metric of all rows, whatever the batches, the devices and the processes are: totals and counts are
    added up over all of them and divided once, at the end. The last batch may have any number of rows, and so may
    each process.

    Args:
        metrics_fn: `metrics_fn(variables, batch)` (functions: `params`; NNX: `metrics_fn(model, batch)`) sees one
            replica's rows of a batch, and returns a dict of `jdp.Mean(total, count)`, `jdp.Sum(total)`, 0-d floats
            (the mean over the rows it sees) and arrays with an entry for each row. Values may be trees of these.
        *arguments: the variables or parameters, and then the batches: a list of batches or a loader, anything that
            `dp.prefetch` takes, or what `dp.prefetch` or `dp.batches` returns. For an NNX module, pass the batches
            alone: the wrapper holds the module, which runs in evaluation mode, and whose state stays as it was.

    Returns:
        The dict, with values on the host. A mean is a float, or a numpy array if its total is an array. A sum is
        an int or a float, or a numpy array. The sums of the batches are added in 64 bits. Entries per row come back
        as one numpy array, with their dtype, in the order of the data; with several processes, each gets the entries
        of its own rows, and all other values are the same everywhere.

    Raises:
        TypeError: metrics that are no dict; a metric of none of these forms, or a scalar that is no mean over the
            rows; the error names it.
        ValueError: there are no rows at all; a metric that has another form or shape in a later batch.

    Example:
        >>> import jax.numpy as jnp, jdp, numpy as np
        >>> dp = jdp.DataParallel(lambda w, x: w * x, devices=[0])
        >>> def metrics_fn(w, batch):
        ...     y = dp(w, batch["x"])
        ...     return {"mean": y.mean(), "positive": jdp.Sum((y > 0).sum()), "y": y}
        >>> batches = [{"x": np.array([-1.0, 2.0])}, {"x": np.array([8.0])}]
        >>> found = dp.evaluate(metrics_fn, 2.0, batches)
        >>> found["mean"], found["positive"], found["y"].tolist()
        (6.0, 2, [-2.0, 4.0, 16.0])

    Source: `Trainer.validate` of PyTorch Lightning, where torch's `DistributedSampler` counts rows twice.
    """
    config: Config = dp._config
    variables, batches = _arguments(dp, metrics_fn, arguments)
    config.refuse_state_axes(VERB)
    variables, nodes = take_nodes(variables, verb=VERB, root="variables")
    variables = put_nodes(broadcast(variables, config.mesh, VERB, "variables"), nodes)

    def results() -> Iterator[tuple[Scattered, float]]:
        """Yields what the program of each batch returns, and the batch's number of rows."""
        waiting: collections.deque[tuple[Scattered, float]] = collections.deque()
        for batch in batches if isinstance(batches, Batches | Prefetched) else prefetch(dp, batches):
            found = _dispatch_batch(config, metrics_fn, variables, batch)
            if found is not None:
                waiting.append(found)
            del found  # or the results of a batch would stay until the next ones come
            if len(waiting) > _IN_FLIGHT:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()

    return _added_up(results())


def _arguments(dp: Wrapper[object], metrics_fn: Any, arguments: Sequence[Any]) -> tuple[Tree, Iterable[Tree]]:
    """Returns the first argument of `metrics_fn`, the variables or the model, and the batches."""
    kind = dp._config.kind
    if not callable(metrics_fn):
        raise TypeError(f"jdp.{VERB}: metrics_fn is a {type(metrics_fn).__name__}; it is called. Pass a function.")
    given = {"linen": ("variables", "batches"), "nnx": ("batches",)}.get(kind, ("params", "batches"))
    if len(arguments) != len(given):
        raise TypeError(
            f"jdp.{VERB}: {len(arguments)} arguments after metrics_fn; for {_KINDS[kind]} there are {len(given)}. Call "
            f"dp.{VERB}(metrics_fn, {', '.join(given)})."
        )
    if capturing():
        raise TypeError(
            f"jdp.explain: dp.{VERB} runs a program for each batch and reads its results; explain shows one program. "
            f"Explain dp.apply, with a batch."
        )
    if not trace_state_clean():
        raise TypeError(
            f"jdp.{VERB}: called inside of jax.jit, jax.grad or the like; it reads the metrics of each batch on the "
            f"host, and there are no values while a program is traced. Call it outside of them."
        )
    dp._config.refuse_other_mesh()
    batches = arguments[-1]
    if isinstance(batches, Batches) and batches.epochs is None:
        raise ValueError(f"jdp.{VERB}: batches.epochs is None; these never end. Pass dp.batches(..., epochs=1).")
    if not isinstance(batches, Batches | Prefetched):
        refuse_one_batch(batches, VERB)
    return (in_evaluation(dp.module), arguments[0]) if kind == "nnx" else arguments  # type: ignore[return-value]


_KINDS = {"linen": "a Linen module", "nnx": "an NNX module, which holds its state,", "function": "a function"}


def _dispatch_batch(config: Config, metrics_fn: Any, variables: Tree, batch: Tree) -> tuple[Scattered, float] | None:
    """Dispatches one batch; returns its results and its number of rows, or None if it has no rows."""
    axes = axes_of_batch(config, batch)
    (args, kwargs), nodes = take_nodes(((variables, batch), {}))
    # No gradient is taken, so `diff` holds no arrays.
    roles, (diff, held) = assign_roles(args, nodes, [], True, [None, 0], VERB)
    where = None if axes is None else ((axes,), config.dim)
    how = Cutting(config.mesh, config.dim, VERB, ("args", "kwargs"), axes=where, place=False, replicas=config.replicas)
    inputs = split((args[1:], kwargs), how)
    layout = inputs._layout
    rows = float(sum(layout.sizes) if layout.is_cut else len(layout.used))  # nothing cut: 1 per replica used
    if not rows:
        return None
    held = held._replace(variables=broadcast(held.variables, config.mesh, VERB))
    program = _evaluation(config, metrics_fn, roles)
    cut, keywords = children(inputs)
    reads: Reads = made_once(metrics_fn, "reads", lambda _: {})
    return unread(lambda some: dispatch(program, config.mesh, (diff, held), some, keywords), cut, reads), rows


def _evaluation(config: Config, metrics_fn: Any, roles: Roles) -> ReplicaProgram:
    """Returns the program that computes the metrics of a batch, and refuses results that are no metrics."""

    def make(metrics_fn: Any) -> ReplicaProgram:
        label = getattr(metrics_fn, "__name__", "metrics")

        def none_and_metrics(*args: Any) -> tuple[None, dict[str, Any]]:
            with _state_explained(args[0], label):
                metrics = metrics_fn(*args)
            if not isinstance(metrics, Mapping):
                what = "an array alone" if isinstance(metrics, jax.Array) else f"a {type(metrics).__name__}"
                raise TypeError(
                    f"jdp.{VERB}: {label} returns {what}; each metric has a name. Return a dict, "
                    f"{{'accuracy': jdp.Mean(hits, count)}}."
                )
            for path, x in jax.tree_util.tree_leaves_with_path(metrics):
                if isinstance(x, jax.Array) and is_key(x):
                    raise TypeError(
                        f"jdp.{VERB}: metrics{jax.tree_util.keystr(path)} is {described(x)}; metrics come back as "
                        f"values of the host, which has no typed PRNG keys. Return jax.random.key_data(x)."
                    )
            return None, dict(metrics)

        loss = loss_of(none_and_metrics, roles, VERB, config.axis_name, config.reduce_state, None, False)
        return ReplicaProgram(on_replicas(_totals(loss), label, verb=VERB))

    return made_once(metrics_fn, (VERB, weakref.ref(config), roles), make)


@contextlib.contextmanager
def _state_explained(variables: Tree, label: str) -> Iterator[None]:
    """Adds a note to the error of a metrics function that got the state of a step in place of variables."""
    try:
        yield
    except Exception as error:
        if isinstance(variables, TrainState):
            error.add_note(
                f"jdp.{VERB}: {label} gets what was passed, a jdp.TrainState. If it takes variables, pass "
                f"{{'params': state.params, **state.state}}."
            )
        raise


def _totals(loss: Loss) -> CallOf:
    """Returns what a replica runs: `((diff, held), *args)` to `(sums, entries for each row, forms)`."""

    def call_of(signature: Signature, replica: int) -> Callable[..., tuple[list[Marked], list[Marked], Forms]]:
        def call(*operands: Any) -> tuple[list[Marked], list[Marked], Forms]:
            values = signature.values_of_replica(operands, replica)
            (diff, before), _, _ = signature.fill(values)
            state = enter(before, signature.axis_name)
            none, metrics, _, _ = run_loss(loss, signature, diff, {}, values, state)
            size = signature.layout.sizes[replica] if signature.layout.is_cut else 1
            forms, sums, rows = forms_of(loss, signature, (none, metrics), (diff, values, state), size, float(size))
            entries = [Marked(x, axis) for x, axis in zip(rows, forms.axes, strict=True)]
            return [Marked(x, None, "sum") for x in sums], entries, forms

        return call

    return call_of


def _added_up(results: Iterable[tuple[Scattered, float]]) -> dict[str, Any]:
    """Returns the metrics of all rows, given those of each batch and its number of rows; adds up on the host."""
    first: tuple[Forms, list[list[Any]]] | None = None  # the first batch's forms, and what `_metric_shapes` yields
    sums: list[Any] = []
    rows: list[list[np.ndarray]] = []
    count = 0.0
    for found, of_batch in results:
        *arrays, forms = join(found, None)
        summed, entries = ([np.asarray(x) for x in part] for part in arrays)
        forms = dataclasses.replace(forms, each=tuple(map(_without_dtypes, forms.each)))
        now = forms, list(_metric_shapes(forms, iter(summed), iter(entries)))
        if first is None:
            first, sums, rows = now, [0] * len(summed), [[] for _ in entries]
        if now != first:
            _refuse_others(first, now)
        count += of_batch
        sums = [a + b.astype(_host_dtype(b.dtype)) for a, b in zip(sums, summed, strict=True)]
        for kept, x in zip(rows, entries, strict=True):
            kept.append(x)
    if first is None:
        raise ValueError(f"jdp.{VERB}: the batches have no rows; metrics of none are no numbers. Pass 1 row or more.")
    (forms, _), totals, joined = first, iter(sums), iter(rows)
    with np.errstate(divide="ignore", invalid="ignore"):  # a mean over nothing is nan, as on a device
        values = [
            _host(form.value(totals, count)) if form.axis is None else np.concatenate(next(joined), form.axis)
            for form in forms.each
        ]
    _, metrics = jax.tree.unflatten(forms.treedef, values)
    return metrics


def _without_dtypes(form: Form) -> Form:
    """Returns the form without the dtypes of sums: those on the host are of 64 bits, whatever each batch has."""
    return form if form.axis is not None else form._replace(dtype=None, parts=tuple(map(_without_dtypes, form.parts)))


def _refuse_others(first: tuple[Forms, list[list[Any]]], later: tuple[Forms, list[list[Any]]]) -> None:
    """Raises a `ValueError` for metrics that are not those of the first batch."""
    before, now = ({*_names_of_forms(forms)} for forms, _ in (first, later))
    if before != now:
        name = min(before ^ now)
        raise ValueError(
            f"jdp.{VERB}: metrics{name} is {'only' if name in now else 'not'} in a later batch; each batch has the "
            f"same metrics, which are added up. Return all of them for each batch."
        )
    (old_forms, old_shapes), (new_forms, new_shapes) = first, later
    each = zip(old_forms.each, old_shapes, new_forms.each, new_shapes, strict=True)
    for name, (old, a, new, b) in zip(_names_of_forms(old_forms), each, strict=True):
        if (old, a) != (new, b):
            raise ValueError(
                f"jdp.{VERB}: metrics{name} is {_described(old, a)}, and in a later batch {_described(new, b)}; "
                f"metrics of several batches are added up, or joined along their rows. Return one form and shape."
            )


def _metric_shapes(forms: Forms, sums: Iterator[np.ndarray], rows: Iterator[np.ndarray]) -> Iterator[list[Any]]:
    """Yields the shapes that each metric must have in every batch; for entries per row, without the axis of rows."""
    for form in forms.each:
        if form.axis is None:
            yield [next(sums).shape for _ in range(form.summands)]
        else:
            x = next(rows)
            yield [x.shape[: form.axis] + x.shape[form.axis + 1 :]]


def _names_of_forms(forms: Forms) -> list[str]:
    return [jax.tree_util.keystr(path[1:]) for path in paths_in(forms.treedef)]


_FORMS = {"mean": "a mean", "ratio": "a jdp.Mean", "sum": "a jdp.Sum", "combination": "a sum of terms"}


def _described(form: Form, shapes: list[Any]) -> str:
    if form.axis is None:
        parts = f" ({' + '.join(_FORMS[part.kind] for part in form.parts[1::2])})" if form.parts else ""
        return f"{_FORMS[form.kind]}{parts} of shape {' and '.join(map(str, dict.fromkeys(shapes)))}"
    return f"an array of {form.dtype} with an entry of shape {shapes[0]} for each row, along axis {form.axis}"


def _host_dtype(dtype: Any) -> Any:
    """Returns the dtype of the sums on the host."""
    if dtype.kind in "fiub":
        return np.float64 if dtype.kind == "f" else np.uint64 if dtype == np.uint64 else np.int64
    return np.complex128 if dtype.kind == "c" else np.float64


def _host(x: Any) -> Any:
    """Returns a Python number for a scalar, otherwise the array."""
    return x.item() if np.ndim(x) == 0 else np.asarray(x)
