"""Keeps what was made for a function for as long as the function lives, and no longer."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

# Not a WeakKeyDictionary: it compares keys by value, and Linen modules need not be hashable.
_kept: dict[int, tuple[weakref.ref[Any], dict[Hashable, Any]]] = {}


def kept(fn: Any, key: Hashable, make: Callable[[Callable[..., Any]], T]) -> T:
    """`make(fn)`, made once per `fn` and `key`; freed with `fn`, to which what is made must refer weakly.

    `make` gets a stand-in that calls `fn` and does not keep it alive. A bound method, which Python
    makes afresh at each access, is known by its object and its function.
    """
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, None)
    number = id(owner)
    entry = _kept.get(number)
    if entry is None or entry[0]() is not owner:
        try:
            ref = weakref.ref(owner, lambda _: _kept.pop(number, None))
        except TypeError:  # of a class with slots: made for this call alone
            return make(fn)
        entry = _kept[number] = (ref, {})
    ref, made = entry
    if (method, key) not in made:

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            target: Any = ref()
            return target(*args, **kwargs) if method is None else method(target, *args, **kwargs)

        stand_in.__name__ = str(getattr(fn, "__name__", type(fn).__name__))
        made[method, key] = make(stand_in)
    return made[method, key]
