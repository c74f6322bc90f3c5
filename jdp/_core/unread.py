"""Hides Python values from a program that does not read them: the names of files in a batch, for example.

A Python value is part of the program, so a new value is a new program. But a function that gets a dict may never read
some of its entries. So the program is first traced with the Python values in dicts hidden; such a dict raises `Read`
if a hidden one is read. Only the values that were read become part of the program. Those in no dict count as read.

    the entry point                  the trace
    `unread(run, batch, reads)`  ->  `reading(fn)` calls `fn` with the hidden entries
         ^ hides fewer                    |
         +------------- Read -------------+  (`fn` asked for one, or failed)
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from .layout import Layout, Static, Tree
from .programs import is_plain, is_watched
from .scattered import Scattered

T = TypeVar("T")
Reads = dict[Any, set[int]]
"""The numbers of the leaves that were read, by the treedef of the batch."""


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Stands for the Python value that is the leaf of this number."""

    leaf: int


class Read(Exception):
    """A signal, not an error: a function has asked for these leaves, which were hidden from it."""

    def __init__(self, leaves: set[int]) -> None:
        super().__init__(leaves)
        self.leaves = leaves


def unread(run: Callable[[Scattered], T], batch: Scattered, reads: Reads) -> T:
    """Returns `run(batch)`; the Python values that `run` does not read are hidden in the batch.

    `reads` holds the leaves that the user's function has asked for so far; `unread` adds to it. With several processes
    (all of which compile one program) and under `jax.jit`, nothing is hidden.
    """
    layout = batch._layout
    if may_hide(layout) and not layout.mesh.spans_processes and is_plain() and not is_watched():
        while (some := _hidden(batch, reads)) is not batch:
            known = reads.setdefault(layout.treedef, set())
            try:
                return run(some)
            except Read as found:
                if found.leaves <= known:
                    break
                known |= found.leaves
    return run(batch)


def may_hide(layout: Layout) -> bool:
    """Returns True if there are Python values in the dicts of a batch."""
    return layout.holds_statics and any(isinstance(layout.leaves[i], Static) for i in _in_dicts(layout.treedef))


def _hidden(batch: Scattered, reads: Reads) -> Scattered:
    """Returns the batch, with stand-ins for the Python values in its dicts that are not in `reads`."""
    layout = batch._layout
    known, leaves = reads.get(layout.treedef, set()), list(layout.leaves)
    for i in _in_dicts(layout.treedef):
        leaf = leaves[i]
        if i not in known and isinstance(leaf, Static):
            leaves[i] = Static(Hidden(i))
    same = all(x is y for x, y in zip(leaves, layout.leaves, strict=True))
    return batch if same else Scattered(batch._arrays, layout.of(layout.treedef, leaves))


def _in_dicts(treedef: Any, first: int = 0, is_entry: bool = False) -> Iterator[int]:
    """Yields the numbers of the leaves in entries of dicts: through dicts, lists and tuples, and nothing else."""
    node = treedef.node_data()
    if node is None:  # a leaf
        yield from [first] if is_entry else []
        return
    kind = node[0]
    for child in treedef.children() if kind in (dict, list, tuple) else []:
        yield from _in_dicts(child, first, is_entry or kind is dict)
        first += child.num_leaves


def reading(fn: Callable[..., T]) -> Callable[..., T]:
    """Returns the function; it raises `Read` if it asks for something that is hidden in its arguments."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        asked: set[int] = set()
        made: list[weakref.ref[Entries]] = []
        given = _shown(args, asked, made)
        if given is args:
            return fn(*args, **kwargs)
        try:
            out = fn(*given, **kwargs)
        except Exception as error:  # hiding may be the cause; if not, fn raises it again with nothing hidden
            raise Read(asked or {*_hidden_leaves(args)}) from error
        del given
        for entries in [alive for ref in made if (alive := ref()) is not None]:  # a callback may read them later
            asked = asked.union(*entries.hidden.values())
        if asked:  # perhaps the function has caught the exception
            raise Read(asked)
        return out

    return call


class Entries(dict[Any, Any]):
    """A dict, some of whose entries are hidden. These may be counted, named and deleted; reading one raises `Read`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden: dict[Any, set[int]] = {}
        self.asked: set[int] = set()

    def _ask(self, *keys: Any) -> None:
        found = {i for key in keys for i in self.hidden.get(key, ()) if dict.__contains__(self, key)}
        if found:
            self.asked |= found
            raise Read(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.hidden = {k: leaves for k, leaves in self.hidden.items() if k != key}
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[Any]:  # without it, `dict(self)` and `{**self}` copy entries past `__getitem__`
        return super().__iter__()


def _asking(name: str) -> Callable[..., Any]:
    """Returns a method of a dict that first asks for what it reads: the entry of its key, or all entries."""
    method, reads_one = getattr(dict, name), name in _READS_ONE

    def call(self: Entries, *args: Any, **kwargs: Any) -> Any:
        self._ask(*(args[:1] if reads_one else self.hidden))
        return method(self, *args, **kwargs)

    return call


_READS_ONE = ("__getitem__", "get", "pop", "setdefault")
_COMPARED = ("__eq__", "__ne__", "__or__", "__ror__", "__ior__")
for _name in (*_READS_ONE, "items", "values", "copy", "popitem", "update", *_COMPARED, "__repr__", "__reduce_ex__"):
    setattr(Entries, _name, _asking(_name))


def _unflatten(keys: tuple[Any, ...], values: Any) -> Any:
    return dict(zip(keys, values, strict=True))


jax.tree_util.register_pytree_node(Entries, lambda x: ([*x.values()], tuple(x)), _unflatten)


def _shown(tree: Tree, asked: set[int], made: list[weakref.ref[Entries]]) -> Tree:
    """Returns the tree with `Entries` for each dict that has hidden entries; the same tree, if there are none."""
    if type(tree) is dict:
        found: dict[Any, Any] = {key: _shown(x, asked, made) for key, x in tree.items()}
        hidden = {key: leaves for key, x in found.items() if (leaves := {*_hidden_leaves(x)})}
        if hidden:
            entries = Entries(found)
            entries.hidden, entries.asked = hidden, asked
            made.append(weakref.ref(entries))
            return entries
        return found if any(found[key] is not x for key, x in tree.items()) else tree
    if type(tree) in (list, tuple):
        parts = [_shown(x, asked, made) for x in tree]
        return type(tree)(parts) if any(x is not y for x, y in zip(parts, tree, strict=True)) else tree
    return tree


def _hidden_leaves(tree: Tree) -> Iterator[int]:
    """Yields the numbers of the hidden leaves in a tree, except those inside of `Entries`."""
    if type(tree) is Hidden:
        yield tree.leaf
    elif type(tree) in (list, tuple):
        for x in tree:
            yield from _hidden_leaves(x)
    elif type(tree) is dict:
        for x in tree.values():
            yield from _hidden_leaves(x)
