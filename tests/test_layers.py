"""Imports go one way, each package imports only what it may, and what JAX does not promise stands in one file."""

import ast
import collections
import pathlib
import re
import sys

import pytest

import jdp

ROOT = pathlib.Path(jdp.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# Each package, from the lowest to the highest, and what it may import beside itself.
ORDER = {
    "_launch": "",
    "_jax": "",
    "_tools.tables": "",
    "_page": "",
    "_version": "",
    "_tools.script": "",
    "_processes": "_jax _launch",
    "_core": "_page _jax _processes",
    "_tools.topology": "_core",
    "_model": "_jax _processes _core",
    "_train": "_page _jax _processes _core _model",
    "_wrapper": "_page _jax _processes _core _model _train",
    "_checkpoint": "_version _jax _processes _core",
    "_tools.explain": "_tools.tables _page _jax _processes _core _tools.topology _model _train",
    "_tools.plan": "_page _core _train _tools.script _tools.tables _tools.topology _tools.explain",
    "_tools.replay": "_tools.script _core _train _checkpoint",
    "_tools.doctor": "_version _tools.tables _jax _core _launch _wrapper",
}
# What jdp/_processes may import of _launch, and _tools.topology of _core: one file each.
ONLY = {
    ("_processes", "_launch"): "_launch.protocol",
    ("_tools.topology", "_core"): "_core.devices",
    ("_tools.doctor", "_launch"): "_launch.protocol",
    ("_tools.doctor", "_wrapper"): "_wrapper.data_parallel",
}
FLAX = {"_model", "_train", "_wrapper", "_checkpoint", "_tools.explain", "_tools.plan"}
FOREIGN = {
    "flax": FLAX,
    "optax": {"_train", "_tools.doctor"},
    "orbax": {"_checkpoint"},
    "etils": {"_checkpoint"},  # Orbax's paths
    "tensorstore": {"_checkpoint"},  # Orbax's files
    "rich": {"_tools.tables"},
    "matplotlib": {"_tools.plan"},
    "jaxlib": {"_jax"},
    "jax": {*ORDER} - {"_launch", "_tools.tables", "_page", "_version", "_tools.script"},
    "numpy": {*ORDER} - {"_launch", "_jax", "_tools.tables", "_page", "_version", "_tools.script"},
}


# What no version promises, by the only file that may have it.
NOT_PROMISED = {
    pathlib.Path("_jax/private.py"): re.compile(
        r"jax\._src|\bjaxlib\.\w|\b(from|import) jaxlib|\b(jax|flax|nnx|linen|optax|ocp)(\.\w+)*\._[a-z]|_nnx_"
        r"|__captures__|\._cache_size\b|\._sharding\b|to_concrete_value|runtime_type|global_state|ClusterEnv"
        r"|get_distributed_runtime"
    ),
    pathlib.Path("_jax/jaxprs.py"): re.compile(
        r"\.eqns\b|\"eqns\"|\.constvars\b|\.val\b|get_bind_params|primitive\.bind|eqn\.(params|source_info|effects)\b"
        r"|jaxpr\.(effects|replace)\b|\bordered_effects"
    ),
}

# And what stands beside it there, for the file would be too long.
BESIDE = {
    pathlib.Path("_jax/jaxprs.py"): {
        pathlib.Path(f"_jax/{name}.py")
        for name in (
            "pieces",
            "rewrites",
            "row_loops",
            "row_pairs",
            "row_places",
            "row_terms",
            "row_values",
            "segments",
        )
    }
}


def imports(path, source=None):
    """`(line, whether it is inside of jdp, dotted name)` of everything that a file imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text() if source is None else source)):
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


def package(parts):
    """The part of jdp that a module belongs to; the tools are one wing, of which each is a part."""
    return ".".join(parts[: 1 + (parts[0] == "_tools")])


def package_of(path):
    return package(path.with_suffix("").parts)


@pytest.mark.parametrize("path", [path for path in MODULES if package_of(path) in ORDER], ids=str)
def test_imports_go_down(path):
    mine = package_of(path)
    for line, inside, name in imports(path):
        top = package(name.split("."))
        if not inside or top == mine:
            continue
        where = f"jdp/{path}:{line}: {mine} may not import {name}"
        assert top in ORDER[mine].split(), where
        assert name.startswith(ONLY.get((mine, top), "") + "." * ((mine, top) in ONLY)), where


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py" and len(path.parts) > 1], ids=str
)
def test_a_package_that_says_what_to_read_names_each_of_its_files(path):
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    files = {file.name for file in (ROOT / path).parent.glob("*.py")} - {"__init__.py"}
    named = {*re.findall(r"`?\b(\w+\.py)\b", docstring)}
    assert named.isdisjoint(files) or files <= named


KERNEL = ("_core", "_model", "_train", "_wrapper", "_jax")
IN_KERNEL = [path for path in MODULES if path.parts[0] in KERNEL]


def test_a_name_of_the_kernel_stands_in_one_module():
    """Of functions and classes: who reads a name, or searches for it, has one of it in mind."""
    found = collections.defaultdict(set)
    for path in IN_KERNEL:
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and path.name != "__init__.py":
                found[node.name].add(str(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def circle(graph):
    """The modules of a circle of imports, in order; none if there is no circle. `graph`: what each imports."""
    done = set()

    def visit(module, path):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])


def test_modules_of_the_kernel_import_each_other_in_no_circle():
    """Imports for types alone count, too: who reads one of two such modules has to read the other."""
    modules = {".".join(path.with_suffix("").parts): path for path in IN_KERNEL if path.name != "__init__.py"}
    graph = {
        module: {name for _, inside, x in imports(path) if inside for name in (x, x.rpartition(".")[0])} & {*modules}
        for module, path in modules.items()
    }
    assert graph["_core.scatter"] >= {"_core.layout", "_core.inputs"}
    assert circle(graph) == []


@pytest.mark.parametrize(
    "graph, expected",
    [({"a": "b", "b": "c", "c": ""}, ""), ({"a": "b", "b": "cd", "c": "", "d": "b"}, "bd"), ({"a": "a"}, "a")],
)
def test_a_circle_is_seen(graph, expected):
    assert circle(graph) == [*expected]


MOST_LINES = 450


@pytest.mark.parametrize("path", IN_KERNEL, ids=str)
def test_a_module_of_the_kernel_is_short(path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= MOST_LINES


# The most classes in each wing of the kernel: who reads it has to know all of these nouns.
MOST_CLASSES = {
    "_jax": 13,
    "_core": 26,
    "_model": 4,
    "_train": 31,
    "_wrapper": 8,
}


def classes(wing):
    """The classes of a wing, each with its module; those inside of others and of functions count, too."""
    paths = [path for path in IN_KERNEL if path.parts[0] == wing]
    nodes = [(path, node) for path in paths for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    return [f"{path}: {node.name}" for path, node in nodes if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("wing", MOST_CLASSES)
def test_a_wing_of_the_kernel_has_few_classes(wing):
    """A new class takes the place of another one, or has a reason that raises the number here."""
    found = classes(wing)
    assert 0 < len(found) <= MOST_CLASSES[wing], "\n".join(found)


def lines_with(pattern, paths):
    """The lines of these files with that in them, except imports."""
    lines = [line for path in paths for line in (ROOT / path).read_text().splitlines()]
    return [line for line in lines if re.search(pattern, line) and not re.match(r" *(from|import) | {4}\w+,$", line)]


CACHE = r"lru_cache|@cache|functools\.cache\b|Weak|Recent|@functools\.cached_property"


@pytest.mark.parametrize(
    "what, pattern, packages, most",
    [
        # What is kept by a key has to be found, bounded and dropped: who reads of one more has to ask when.
        ("caches", CACHE, KERNEL, 28),
        ("caches", CACHE, ("_core", "_jax"), 20),
        # What differs between one process and several is a method of ReplicaMesh, or of what it holds.
        ("questions", "spans_processes", ("_core",), 15),
        ("questions", "spans_processes", KERNEL, 25),
    ],
)
def test_what_a_reader_of_the_core_has_to_keep_in_mind(what, pattern, packages, most):
    """Where one is added, another goes first; where some have gone, the new number is written here."""
    found = lines_with(pattern, [path for path in IN_KERNEL if path.parts[0] in packages])
    assert len(found) <= most, f"{len(found)} {what} in {', '.join(packages)}: " + "\n".join(found)


def foreign(path, source=None):
    """What a file imports and its package may not, of other projects."""
    package = package_of(path)
    for line, inside, name in imports(path, source):
        top = name.split(".")[0]
        if not inside and top not in sys.stdlib_module_names and package not in FOREIGN.get(top, ()):
            yield f"jdp/{path}:{line}: {package} may not import {name}"


def not_promised(path, source=None):
    """The lines of a file that use what stands in one other file."""
    source = (ROOT / path).read_text() if source is None else source
    for home, pattern in NOT_PROMISED.items():
        for number, line in enumerate(source.splitlines(), 1):
            if path != home and path not in BESIDE.get(home, ()) and (found := pattern.search(line)):
                yield f"jdp/{path}:{number}: {found[0]!r} is not promised, and belongs into jdp/{home}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_foreign_imports(path):
    """`_launch` has the standard library alone, `_core` jax and numpy, and Flax is seen from the model upwards."""
    assert [*foreign(path)] == []


@pytest.mark.parametrize("path", [p for p in MODULES if package_of(p) not in ("_launch", "_tools.doctor")], ids=str)
def test_processes_have_no_connections_of_their_own(path):
    """What they tell each other goes through JAX: it alone opens ports, and who hears at them is its business."""
    opens = r"\.(listen|accept|connect|create_server|create_connection)\(|import (socketserver|http|asyncio|ssl)\b"
    assert re.search(opens, (ROOT / path).read_text()) is None


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_what_jax_does_not_promise_is_in_one_file(path):
    assert [*not_promised(path)] == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("_launch/cli.py", "import jax"),
        ("_launch/cli.py", "def f():\n    from numpy import zeros"),
        ("_jax/jaxprs.py", "import flax"),
        ("_core/scatter.py", "from flax import nnx"),
        ("_core/scatter.py", "import optax"),
        ("_core/scatter.py", "import orbax.checkpoint as ocp"),
        ("_model/nnx.py", "import orbax.checkpoint"),
        ("_processes/agree.py", "import flax"),
        ("_train/step.py", "import torch"),
        ("_tools/tables.py", "import jax"),
        ("_page.py", "import jax"),
    ],
)
def test_a_foreign_import_in_the_wrong_package_is_seen(path, source):
    assert len([*foreign(pathlib.Path(path), source)]) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("_core/scatter.py", "from jax._src.core import trace_state_clean"),
        ("_core/scatter.py", "import jaxlib"),
        ("_core/devices.py", "    from jaxlib._jax import Device"),
        ("_core/devices.py", "device.client.runtime_type"),
        ("_tools/explain/calls.py", "sum(run._cache_size() for run in programs)"),
        ("_core/replicate.py", "x._sharding == to"),
        ("_core/scattered.py", "x.to_concrete_value()"),
        ("_processes/exchange.py", "distributed.global_state.client"),
        ("_processes/initialize.py", "clusters.ClusterEnv"),
        ("_model/nnx.py", 'hasattr(x, "_nnx_tabulate_id")'),
        ("_model/nnx.py", "nnx.graph._node(x)"),
        ("_core/uneven.py", "for eqn in jaxpr.eqns:"),
        ("_core/uneven.py", "eqn.primitive.bind(*values)"),
        ("_model/sync_batch_norm.py", "eqn.params['axes']"),
        ("_jax/private.py", "jaxpr.replace(eqns=[])"),
        ("_jax/jaxprs.py", "from jax._src import core"),
    ],
)
def test_what_is_not_promised_is_seen_in_another_file(path, source):
    assert len([*not_promised(pathlib.Path(path), source)]) == 1
