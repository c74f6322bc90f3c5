"""Tells whether a function makes each row of its results from that row of its inputs alone, at the same place.

Such a function may get extra rows, if their results are dropped: the results of the other rows do not change, and
neither do their derivatives. Traces for two numbers of rows show it: an array has rows along the axis whose size
differs between them, and what is equal in both does not depend on the number of rows. A function that cannot be
followed, or that asks for the number of rows, counts as one that mixes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .jaxprs import CALLS, axes, bind, inside, is_literal, opened, read
from .row_primitives import CUMULATIVE, ELEMENTWISE

_MIXED = "rows may meet, or change their places"


def keeps_places(one: Any, other: Any, rows: tuple[int, int]) -> bool:
    """Returns True if a function keeps each row at its place; `one` and `other` are its traces for `rows[0]`, `[1]`."""
    try:
        if one.effects or other.effects:
            return False  # the extra rows would print, or call back, too
        _read_jaxprs(one, other, rows)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError):
        return False  # also where this version of JAX has other parameters than those known here
    return True


class _Eqn(NamedTuple):
    """An equation of the first trace, with the axis of the rows for each operand and each result, or None."""

    params: dict[str, Any]
    shapes: list[tuple[int, ...]]  # of the operands
    ins: list[int | None]
    outs: list[int | None]

    @property
    def k(self) -> int:
        """The axis of the rows in the first operand that has rows."""
        return next(axis for axis in self.ins if axis is not None)

    @property
    def j(self) -> int:
        """The axis of the rows in the first result."""
        if self.outs[0] is None:
            raise ValueError(_MIXED)
        return self.outs[0]


def _axis(v: Any, w: Any, rows: tuple[int, int]) -> int | None:
    """Returns the axis that has rows: the only one where the shapes differ, in proportion to the rows."""
    a, b = v.aval.shape, w.aval.shape
    if len(a) != len(b) or v.aval.dtype != w.aval.dtype:
        raise ValueError(_MIXED)
    apart = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if not apart:
        return None
    (i,) = apart
    if a[i] % rows[0] or a[i] // rows[0] * rows[1] != b[i]:
        raise ValueError(_MIXED)
    return i


def _read_jaxprs(one: Any, other: Any, rows: tuple[int, int], in_derivative: bool = False) -> None:
    """Reads two traces of one function side by side; raises an error if a row may leave its place."""
    a, b = opened(one), opened(other)
    same = dict(zip(a.invars, b.invars, strict=True))
    same.update(zip(getattr(a, "constvars", ()), getattr(b, "constvars", ()), strict=True))
    consts = zip(getattr(one, "consts", ()), getattr(other, "consts", ()), strict=True)
    if not all(_is_same(x, y) for x, y in consts):
        raise ValueError(_MIXED)

    def matches(v: Any, w: Any) -> bool:
        if is_literal(v) or is_literal(w):
            return is_literal(v) and is_literal(w) and _is_same(read({}, v), read({}, w))
        return same[v] is w

    for e, f in zip(a.eqns, b.eqns, strict=True):
        if e.primitive is not f.primitive or not all(map(matches, e.invars, f.invars)):
            raise ValueError(_MIXED)
        _read_equations(e, f, rows, in_derivative)
        same.update(zip(e.outvars, f.outvars, strict=True))
    if not all(map(matches, a.outvars, b.outvars)):
        raise ValueError(_MIXED)


def _read_equations(e: Any, f: Any, rows: tuple[int, int], in_derivative: bool) -> None:
    name = e.primitive.name.replace("-", "_")
    ins = [_axis(v, w, rows) for v, w in zip(e.invars, f.invars, strict=True)]
    outs = [_axis(v, w, rows) for v, w in zip(e.outvars, f.outvars, strict=True)]
    if name in CALLS or name in _LOOPS:
        if name == "custom_vjp_call" and any(axis is not None for axis in ins):
            raise ValueError(_MIXED)  # its derivative may do anything with the rows
        if any(e.params.get(key) != f.params.get(key) for key in _LOOPS.get(name, ())):
            raise ValueError(_MIXED)
        for pair in zip(inside(e), inside(f), strict=True):
            _read_jaxprs(*pair, rows, in_derivative)
        if name == "custom_jvp_call" and not in_derivative:  # a derivative may call the function itself
            _read_jaxprs(_derivative(e), _derivative(f), rows, True)
        return
    sized = _SIZED.get(name, ())
    for key in e.params:
        if key not in sized and not _is_same(e.params[key], f.params[key]):
            raise ValueError(_MIXED)
    if all(axis is None for axis in (*ins, *outs)):
        # A numbered axis is one of the array; over a named axis, replicas communicate.
        meets = name != "axis_index" and not all(hasattr(axis, "__index__") for axis in axes(e))
        if meets or any(e.params[key] != f.params[key] for key in sized):
            raise ValueError(_MIXED)
        return
    eqn = _Eqn(e.params, [v.aval.shape for v in e.invars], ins, outs)
    is_made = all(axis is None for axis in ins)
    rule = (_MADE if is_made else _RULES).get(name)
    if name.startswith("random_") and not _draws_by_place(e.invars[0].aval, e.outvars[0].aval):
        raise ValueError(_MIXED)
    if rule is None or not rule(eqn):
        raise ValueError(_MIXED)


def _is_same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, Tracer) or isinstance(y, Tracer):
        return False
    if hasattr(x, "shape") or hasattr(y, "shape"):
        is_small = math.prod(jnp.shape(x)) <= _SMALL and jnp.shape(x) == jnp.shape(y)
        return is_small and jnp.result_type(x) == jnp.result_type(y) and bool(((x == y) | (x != x) & (y != y)).all())
    return bool(x == y) or (x != x and y != y)


_SMALL = 1 << 12  # elements of a constant that are compared


def _derivative(eqn: Any) -> Any:
    """Returns the jaxpr of the derivative of a `custom_jvp_call`."""
    avals = [v.aval for v in eqn.invars]
    inexact = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def run(values: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
        def of_some(*some: Any) -> list[Any]:
            chosen = dict(zip(inexact, some, strict=True))
            return bind(eqn, [chosen.get(i, x) for i, x in enumerate(values)])

        return jax.jvp(of_some, [values[i] for i in inexact], tangents)

    return jax.make_jaxpr(run)(avals, [avals[i] for i in inexact])


def _draws_by_place(*avals: Any) -> bool:
    """Returns True if each random number depends on its key and its place alone, and not on how many are drawn."""
    keys = [aval for aval in avals if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)]
    is_by_place: Any = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return bool(is_by_place) and bool(keys) and all("fry" in str(aval.dtype) for aval in keys)


_LOOPS = {
    "scan": ("length", "reverse", "num_consts", "num_carry"),
    "while": ("cond_nconsts", "body_nconsts"),
    "cond": (),
}
# The parameters that hold sizes, and may differ between the traces; a rule looks at them, or at the resulting shapes.
_SIZED: dict[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("shape",),
    "iota": ("shape",),
    "reshape": ("new_sizes",),
    "slice": ("limit_indices",),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("slice_sizes",),
    "random_bits": ("shape",),
}


def _elementwise(e: _Eqn) -> bool:
    """Accepts an elementwise operation: all operands and results have their rows along one axis."""
    return all(axis in (None, e.j) for axis in e.ins) and all(axis == e.j for axis in e.outs)


def _apart_from_rows(key: str) -> Callable[[_Eqn], bool]:
    """Returns a rule for operations along one axis or more; none of these may be the axis of the rows."""
    return lambda e: _elementwise(e) and e.j not in jax.tree.leaves(e.params[key])


def _without(key: str) -> Callable[[_Eqn], bool]:
    """Returns a rule for operations that remove axes; none of these may be the axis of the rows."""

    def rule(e: _Eqn) -> bool:
        gone = e.params[key]
        return e.k not in gone and e.j == e.k - sum(axis < e.k for axis in gone)

    return rule


def _reshape(e: _Eqn) -> bool:
    before = math.prod(e.shapes[0][: e.k])
    return e.params["dimensions"] is None and before == math.prod(e.params["new_sizes"][: e.j])


def _pad(e: _Eqn) -> bool:
    return _elementwise(e) and e.ins[1] is None and tuple(e.params["padding_config"][e.k]) == (0, 0, 0)


def _slice(e: _Eqn) -> bool:
    start, limit, strides = (e.params[key] for key in ("start_indices", "limit_indices", "strides"))
    is_whole = start[e.k] == 0 and limit[e.k] == e.shapes[0][e.k] and (strides is None or strides[e.k] == 1)
    return e.j == e.k and is_whole


def _dynamic_slice(e: _Eqn) -> bool:
    whole = e.ins[0] is not None and e.params["slice_sizes"][e.k] == e.shapes[0][e.k]
    return whole and e.j == e.k and all(axis is None for axis in e.ins[1:])


def _dynamic_update_slice(e: _Eqn) -> bool:
    is_whole = e.ins[0] == e.ins[1] == e.j and e.shapes[0][e.j] == e.shapes[1][e.j]
    return is_whole and all(axis is None for axis in e.ins[2:])


def _gather_rule(e: _Eqn) -> bool:
    numbers, sizes, (operand, indices) = e.params["dimension_numbers"], e.params["slice_sizes"], e.ins
    batch = [i for i in range(len(e.shapes[1]) - 1 + len(numbers.offset_dims)) if i not in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if operand is not None and indices is not None:  # each row by an index of its own
        pairs = [*zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)]
        return (operand, indices) in pairs and batch[indices] == e.j
    if operand is None:
        return indices is not None and indices < len(e.shapes[1]) - 1 and batch[indices] == e.j
    kept = [i for i in range(len(e.shapes[0])) if i not in gone]
    is_whole = operand in kept and operand not in numbers.start_index_map and sizes[operand] == e.shapes[0][operand]
    return is_whole and numbers.offset_dims[kept.index(operand)] == e.j


def _dot_general(e: _Eqn) -> bool:
    contracted, batch = e.params["dimension_numbers"]
    places = []
    for i, axis in enumerate(e.ins):
        if axis is None:
            continue
        free = [x for x in range(len(e.shapes[i])) if x not in contracted[i] and x not in batch[i]]
        if axis in batch[i]:
            places.append(tuple(batch[i]).index(axis))
        elif axis in free and e.ins[1 - i] is None:
            others = len(e.shapes[0]) - len(contracted[0]) if i else len(batch[0])
            places.append(others + free.index(axis))
        else:
            return False
    return all(place == e.j for place in places)


def _convolution_rule(e: _Eqn) -> bool:
    lhs, _, out = e.params["dimension_numbers"]
    return e.ins == [lhs[0], None] and out[0] == e.j and e.params["batch_group_count"] == 1


def _window(e: _Eqn) -> bool:
    keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return (
        _elementwise(e) and all(e.params[key][e.k] == 1 for key in keys) and tuple(e.params["padding"][e.k]) == (0, 0)
    )


def _top_k(e: _Eqn) -> bool:
    return _elementwise(e) and e.k != e.params.get("axis", len(e.shapes[0]) - 1) % len(e.shapes[0])


_Rule = Callable[[_Eqn], bool]
# The rules for operands with rows.
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(CUMULATIVE, _apart_from_rows("axis")),
    **dict.fromkeys("argmax argmin reduce_sum reduce_max reduce_min reduce_prod".split(), _without("axes")),
    **dict.fromkeys("reduce_and reduce_or reduce_xor".split(), _without("axes")),
    **dict.fromkeys("reduce_window_max reduce_window_min reduce_window_sum".split(), _window),
    "broadcast_in_dim": lambda e: e.params["broadcast_dimensions"][e.k] == e.j,
    "concatenate": _apart_from_rows("dimension"),
    "conv_general_dilated": _convolution_rule,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather_rule,
    "optimization_barrier": lambda e: e.ins == e.outs,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _apart_from_rows("dimensions"),
    "slice": _slice,
    "sort": _apart_from_rows("dimension"),
    "split": _apart_from_rows("axis"),
    "squeeze": _without("dimensions"),
    "top_k": _top_k,
    "transpose": lambda e: e.params["permutation"][e.j] == e.k,
}
# The rules for results with rows, made of operands without: what is made for few rows must begin what is for more.
_MADE: dict[str, _Rule] = {
    "broadcast_in_dim": lambda e: True,
    "iota": lambda e: True,
    "random_bits": lambda e: e.j == 0 and not e.shapes[0],
}
