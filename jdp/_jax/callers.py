"""Tells whose code made an equation: the user's line, a function of JAX, a module. JAX keeps the traceback of each."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any


def _frames(eqn: Any) -> list[Any]:
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return list(getattr(traceback, "frames", ()))


def is_made_in(eqn: Any, function: str) -> bool:
    """Returns True if an equation was made in a function of this name; False if JAX has not kept its traceback."""
    return any(x.function_name.split(".")[0] == function for x in _frames(eqn))


def is_made_by(eqn: Any, package: str) -> bool:
    """Returns True if an equation was made by a package that is loaded, or by code that the package has called."""
    folders = _folders(package)
    return bool(folders) and any(os.path.abspath(x.file_name).startswith(folders) for x in _frames(eqn))


def is_made_in_module(around: Sequence[Any]) -> bool:
    """Returns True if an equation was made in a module: in a `__call__` that is not JAX's, or by Linen itself.

    Other methods of a module may be losses. `around` has the equations that the equation is in, the outermost first,
    and then itself. Those inside of a `jit` are not looked at, because JAX may have cached them from another caller's
    trace. Returns False if JAX has not kept the traceback.
    """
    jax_folder, own = (_folders(name) for name in ("jax", __name__.partition(".")[0]))
    linen = _folders("flax.linen", "flax.core")
    for eqn in around:
        made_by = [(os.path.abspath(x.file_name), x.function_name.split(".")[-1]) for x in _frames(eqn)]
        made_by = list(itertools.takewhile(lambda x: not x[0].startswith(own), made_by))  # those that jdp called
        made_by = [x for x in made_by if not x[0].startswith(jax_folder)]
        if made_by and made_by[0][0].startswith(linen) or any(name == "__call__" for _, name in made_by):
            return True  # Linen itself makes the `jit` of nn.jit(Model)
        if eqn.primitive.name in ("jit", "pjit"):
            break
    return False


def _folders(*packages: str) -> tuple[str, ...]:
    """Returns the folders of the packages that are loaded, each with a separator at its end."""
    loaded = [sys.modules[name] for name in packages if name in sys.modules]
    return tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in loaded)


def source_line(eqn: Any) -> str:
    """Returns the user's own line that made an equation: "file.py:12", or "" where JAX has not kept it."""
    libraries = _folders("jax", "flax", __name__.partition(".")[0])
    frames = [(os.path.abspath(x.file_name), x.line_num) for x in _frames(eqn)]
    frames = [x for x in frames if not x[0].startswith(libraries) and "importlib" not in x[0]]
    # A frame of an installed library, such as optax, is only the second choice: a line of the user's has called it.
    for path, line in [x for x in frames if "site-packages" not in x[0]] or frames:
        return f"{os.path.basename(path)}:{line}"
    return ""
