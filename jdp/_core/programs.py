"""Keeps what was made for a function while the function lives; of what was made for sizes, what was used last."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")

SIZES = 128
"""How many sizes of a batch each function has programs for at once, and layouts, and known calls."""


class Recent(OrderedDict[K, T]):
    """A dict of so many entries; a new one takes the place of the one that was asked for longest ago."""

    def used(self, key: K) -> T | None:
        """The entry with this key, which is the last now that goes; None where there is none."""
        try:
            self.move_to_end(key)
        except KeyError:
            return None
        return self.get(key)

    def __setitem__(self, key: K, value: T) -> None:
        super().__setitem__(key, value)
        while len(self) > SIZES:
            self.popitem(last=False)


# Not a WeakKeyDictionary: it compares keys by value, and Linen modules need not be hashable.
_kept: dict[int, tuple[Callable[[], Any], dict[Hashable, Any]]] = {}
MOST_HELD = 16
_held: list[Any] = []  # what cannot be referred to weakly, the last used last


def kept(fn: Any, key: Hashable, make: Callable[[Callable[..., Any]], T], store: dict[int, Any] = _kept) -> T:
    """`make(fn)`, made once per `fn` and `key`; freed with `fn`, to which what is made must refer weakly, or the store.

    An object of a class with `__slots__` tells nobody when it is freed: the last 16 of those that were used stay alive.
    `make` gets a stand-in that calls `fn` and does not keep it alive. A bound method, which Python
    makes afresh at each access, is known by its object and its function.
    """
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, None)
    number = id(owner)
    entry = store.get(number)
    if entry is None or entry[0]() is not owner:
        try:
            ref: Callable[[], Any] = weakref.ref(owner, lambda _: store.pop(number, None))
        except TypeError:  # of a class with slots
            ref = functools.partial(_itself, owner)
        entry = store[number] = (ref, {})
    ref, made = entry
    if isinstance(ref, functools.partial):
        _hold(owner)
    if (method, key) not in made:

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            target: Any = ref()
            return target(*args, **kwargs) if method is None else method(target, *args, **kwargs)

        stand_in.__name__ = str(getattr(fn, "__name__", type(fn).__name__))
        made[method, key] = make(stand_in)
    return made[method, key]


def _itself(x: Any) -> Any:
    return x


def _hold(owner: Any) -> None:
    """Keeps alive what is known by its number, for no other object to get that; and lets go of what was last used."""
    _held[:] = [x for x in _held if x is not owner] + [owner]
    if len(_held) > MOST_HELD:
        _kept.pop(id(_held.pop(0)), None)
