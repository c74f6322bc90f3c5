"""Imports go one way, each package imports only what it may, and what JAX does not promise stands in one file."""

import ast
import pathlib

import pytest

import jdp

ROOT = pathlib.Path(jdp.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# Each package, from the lowest to the highest, and what it may import beside itself.
ORDER = {
    "_launch": "",
    "_jax": "",
    "_tables": "",
    "_version": "",
    "_processes": "_jax _launch",
    "_core": "_jax _processes",
    "_topology": "_core",
    "_model": "_jax _processes _core",
    "_train": "_jax _processes _core _model",
    "_wrapper": "_jax _processes _core _model _train",
    "_checkpoint": "_version _jax _processes _core",
    "_explain": "_tables _jax _processes _core _topology _model _train",
    "_plan": "_tables _jax _processes _core _topology _model _train _explain",
    "_doctor": "_version _tables _jax _core _launch",
}
# What jdp/_processes may import of _launch, and _topology of _core: one file each.
ONLY = {
    ("_processes", "_launch"): "_launch.protocol", ("_topology", "_core"): "_core.devices",
    ("_doctor", "_launch"): "_launch.protocol",
}
FLAX = {"_model", "_train", "_wrapper", "_checkpoint", "_explain", "_plan"}
FOREIGN = {
    "flax": FLAX,
    "optax": {"_train"},
    "orbax": {"_checkpoint"},
    "rich": {"_tables", "_plan", "_doctor", "_explain"},
    "jax": {package for package in ORDER if package != "_launch"} | {"__init__", "__main__", "distributed"},
    "numpy": {package for package in ORDER if package != "_launch"},
}


def imports(path):
    """`(line, package or foreign module, dotted name)` of everything that a file imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, False, name.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, False, node.module
        elif isinstance(node, ast.ImportFrom):
            base = path.parts[: len(path.parts) - node.level]
            inside = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                yield node.lineno, True, f"{inside}.{name.name}" if inside else name.name


def package_of(path):
    return path.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [path for path in MODULES if package_of(path) in ORDER], ids=str)
def test_imports_go_down(path):
    package = package_of(path)
    for line, inside, name in imports(path):
        top = name.split(".")[0]
        if not inside or top == package:
            continue
        where = f"jdp/{path}:{line}: {package} may not import {name}"
        assert top in ORDER[package].split(), where
        assert name.startswith(ONLY.get((package, top), "") + "." * ((package, top) in ONLY)), where
