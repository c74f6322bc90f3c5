"""Nested structures as JSON, so that torch and jdp can be given the same ones and their answers compared as text."""

from __future__ import annotations

import collections
import typing

import numpy as np


class Point(typing.NamedTuple):
    """A namedtuple with a field that is not an array."""

    x: typing.Any
    label: typing.Any


def rows(*shape, start=0, dtype="float32"):
    """The JSON of an array that counts up from `start`."""
    values = np.arange(start, start + int(np.prod(shape))).astype(dtype)
    return {"array": values.reshape(shape).tolist(), "dtype": dtype, "shape": list(shape)}


# name: (structure, number of devices, dim)
SCATTERED = {
    "array": (rows(10, 2), 4, 0),
    "array_dim_1": (rows(2, 10), 4, 1),
    "array_dim_minus_1": (rows(3, 5), 4, -1),
    "array_dim_minus_2": (rows(7, 2), 3, -2),
    "ints": (rows(9, dtype="int32"), 4, 0),
    "bools": ({"array": [True, False, True, True, False], "dtype": "bool", "shape": [5]}, 4, 0),
    "one_row": (rows(1, 3), 4, 0),
    "no_rows": (rows(0, 3), 4, 0),
    "six_over_four": (rows(6), 4, 0),
    "one_device": (rows(5), 1, 0),
    "tuple": ({"tuple": [rows(5, 2), rows(5, start=100)]}, 2, 0),
    "list": ({"list": [rows(5, 2), rows(5, start=100)]}, 2, 0),
    "list_of_images": ({"list": [rows(3, 2), rows(3, 2, start=50), rows(3, 2, start=90)]}, 2, 0),
    "dict": ({"dict": [["b", rows(7, 2)], ["a", rows(7, start=100)]]}, 3, 0),
    "ordered_dict": ({"ordered": [["b", rows(7, 2)], ["a", rows(7, start=100)]]}, 3, 0),
    "namedtuple": ({"point": [rows(5, 2), "left"]}, 2, 0),
    "nested": (
        {"tuple": [{"list": [{"dict": [["k", {"tuple": [rows(8, 1), 3]}]]}, None]}, {"point": [rows(8), True]}]}, 4, 0
    ),
    "others_beside": ({"tuple": [rows(4), None, "text", 3, 2.5, True, {"list": ["a", {"dict": [["z", 1]]}]}]}, 2, 0),
    "empty_containers": ({"tuple": [rows(4), {"tuple": []}, {"list": []}, {"dict": []}]}, 2, 0),
}  # fmt: skip

# name: (what each replica returned, dim)
GATHERED = {
    "arrays": ([rows(3, 2), rows(3, 2, start=10), rows(1, 2, start=20)], 0),
    "arrays_dim_1": ([rows(2, 3), rows(2, 1, start=10)], 1),
    "arrays_dim_minus_1": ([rows(2, 3), rows(2, 1, start=10)], -1),
    "ints": ([rows(2, dtype="int32"), rows(2, start=7, dtype="int32")], 0),
    "scalars": ([rows(), rows(start=1), rows(start=2)], 0),
    "one_scalar": ([rows(start=5)], 0),
    "not_batched": ([rows(2, 1), rows(2, 1), rows(2, 1)], 0),
    "tuple": ([{"tuple": [rows(2), rows(2, 1)]}, {"tuple": [rows(1, start=5), rows(1, 1, start=9)]}], 0),
    "list": ([{"list": [rows(2), {"list": [rows(1)]}]}, {"list": [rows(1), {"list": [rows(4)]}]}], 0),
    "dict": ([{"dict": [["b", rows(2)], ["a", rows(1)]]}, {"dict": [["b", rows(1)], ["a", rows(3)]]}], 0),
    "ordered_dict": ([{"ordered": [["b", rows(2)], ["a", rows(1)]]}, {"ordered": [["b", rows(1)], ["a", rows(3)]]}], 0),
    "namedtuple": ([{"point": [rows(2), rows(3)]}, {"point": [rows(1), rows(1)]}], 0),
    "nones": ([{"tuple": [rows(2), None]}, {"tuple": [rows(1), None]}], 0),
    "empty": ([{"tuple": [{"list": []}, {"dict": []}]}, {"tuple": [{"list": []}, {"dict": []}]}], 0),
}  # fmt: skip

_CONTAINERS = {"tuple": tuple, "list": list, "point": lambda xs: Point(*xs)}
_MAPPINGS = {"dict": dict, "ordered": collections.OrderedDict}


def decode(tree, array):
    """The structure that the JSON describes; `array(nested list, dtype=...)` makes its arrays."""
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return array(np.array(tree["array"], dtype=tree["dtype"]).reshape(tree["shape"]))
    ((kind, children),) = tree.items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((key, decode(child, array)) for key, child in children)
    return _CONTAINERS[kind](decode(child, array) for child in children)


def encode(tree):
    """The JSON that describes a structure of torch tensors or of jax or numpy arrays.

    The keys of a dict are sorted, as JAX sorts them in every pytree; those of an OrderedDict are in order.
    """
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return {
            "array": tree.tolist(),
            "dtype": str(tree.dtype).removeprefix("torch."),
            "shape": list(tree.shape),
        }
    if isinstance(tree, Point):
        return {"point": [encode(child) for child in tree]}
    for name, kind in (*_MAPPINGS.items(), ("tuple", tuple), ("list", list)):
        if type(tree) is kind:
            if name not in _MAPPINGS:
                return {name: [encode(child) for child in tree]}
            items = sorted(tree.items()) if name == "dict" else tree.items()
            return {name: [[key, encode(child)] for key, child in items]}
    return tree
