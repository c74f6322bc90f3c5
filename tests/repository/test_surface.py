"""The public names, their docstrings and annotations, and the shape of the code."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pathlib
import statistics
import subprocess
import sys
import typing

import pytest

import jdp
from jdp._tools.explain.report import Report
from jdp._train import train_step, value_and_grad
from jdp._wrapper import data_parallel

PACKAGE = pathlib.Path(jdp.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [
    "Batches",
    "Checkpointer",
    "DataParallel",
    "LossCheck",
    "Mean",
    "NNXTrainStep",
    "Report",
    "Scattered",
    "Sum",
    "TrainState",
    "TrainStep",
    "chunk_sizes",
    "data_parallel",
    "explain",
    "gather",
    "parallel_apply",
    "reduce_add",
    "replicate",
    "scatter",
    "topology",
    "virtual_cpu_devices",
]
METHODS = ["apply", "gather", "init", "parallel_apply", "prefetch", "replicate", "scatter"]
METHODS += ["value_and_grad", "grad", "train_step", "evaluate", "parallel", "check_replicas", "batches"]
PUBLIC_MODULES = {"distributed.py": ["DesyncError", "initialize"], "__main__.py": ["main"]}


def module_name(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def public_functions():
    """Every public function and method, with its name."""
    for name in NAMES:
        value = getattr(jdp, name)
        if not inspect.isclass(value):
            yield name, value
            continue
        for attribute, member in vars(value).items():
            member = member.fget if isinstance(member, property) else member
            if not getattr(member, "__module__", "jdp").startswith("jdp"):
                continue  # made by flax.struct
            if inspect.isfunction(member) and (attribute in ("__init__", "__call__") or attribute[0] != "_"):
                yield f"{name}.{attribute}", member


def test_the_public_names_are_pinned():
    public = [name for name, value in vars(jdp).items() if name[0] != "_" and not inspect.ismodule(value)]
    assert sorted(public) == sorted(NAMES)
    assert sorted(jdp.__all__) == dir(jdp) == sorted([*NAMES, "__version__", "distributed"])
    assert {getattr(jdp, name).__module__ for name in NAMES} == {"jdp"}


def test_every_module_of_the_package_is_private_and_imports():
    for path in MODULES:
        top = path.relative_to(PACKAGE).parts[0]  # of a private package every module is private
        assert top.startswith("_") or top in PUBLIC_MODULES, path
        assert importlib.import_module(module_name(path))
    assert "utils" not in " ".join(path.name for path in MODULES)


def test_the_names_of_distributed_are_pinned():
    public = [name for name, value in vars(jdp.distributed).items() if name[0] != "_" and not inspect.ismodule(value)]
    assert sorted(public) == PUBLIC_MODULES["distributed.py"]
    assert "Example:" in jdp.distributed.initialize.__doc__ and "Source: " in jdp.distributed.initialize.__doc__
    assert typing.get_type_hints(jdp.distributed.initialize)


def test_the_names_of_a_report_are_pinned():
    names = {*dir(Report), *(field.name for field in dataclasses.fields(Report))}
    assert sorted(name for name in names if name[0] != "_") == (
        "batch_bytes bytes collective_bytes collectives compilations compile_seconds device_kind devices "
        "exposed_seconds fits flops gradient_bytes hlo in_flight label memory_bytes one_device optimizer_bytes "
        "output_bytes parameter_bytes peak_bytes platform processes rows save schedule seconds show state_bytes "
        "temp_bytes unscattered unused_donations work".split()
    )
    assert [bare_signature(one) for one in (Report.save, Report.show)] == ["(self, path)", "(self)"]


@pytest.mark.parametrize(
    "name, expected",
    list(
        {
            "scatter": "(inputs, devices=None, dim=0, *, chunk_sizes=None)",
            "replicate": "(tree, devices=None)",
            "parallel_apply": "(fn, replicas, inputs, kwargs=None)",
            "gather": "(outputs, output_device=None, dim=0)",
            "reduce_add": "(outputs, destination=None)",
            "chunk_sizes": "(size, n)",
            "data_parallel": "(apply_fn, params, batch, devices=None, output_device=None, dim=0, kwargs=None, *, "
            "device_ids=None)",
            "virtual_cpu_devices": "(n)",
            "explain": "(fn, /, *args, **kwargs)",
            "topology": "(name, shape=None, *, hosts=None, per_host=None)",
        }.items()
    ),
)
def test_signatures_are_those_of_the_contract(name, expected):
    assert bare_signature(getattr(jdp, name)) == expected


def bare_signature(function, skip=0):
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[skip:]]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("'", '"')


def test_the_signature_of_data_parallel_the_class():
    assert bare_signature(jdp.DataParallel) == (
        "(module, devices=None, output_device=None, dim=0, *, "
        'in_axes=None, out_axes=None, axis_name="data", reduce_state="primary", state_axes=None, '
        "replicas=None, shard_params=False, device_ids=None)"
    )


def test_the_signature_of_a_subclass_and_of_a_wrapper_are_their_own():
    class Named(jdp.DataParallel):
        def __init__(self, name):
            super().__init__(lambda w, x: w * x, devices=[0])

    assert bare_signature(jdp.DataParallel) == bare_signature(jdp.DataParallel.__init__, skip=1)
    assert bare_signature(Named) == "(name)"
    assert bare_signature(Named("a")) == "(*args, **kwargs)"  # of a call


@pytest.mark.parametrize(
    "function, arguments, beside",
    [
        (jdp.DataParallel.__init__, data_parallel.WrapperArguments, {"shard_params"}),
        (train_step.train_step, train_step.StepArguments, set()),
    ],
    ids=["DataParallel", "train_step"],
)
def test_the_keywords_that_a_type_checker_knows_are_those_of_the_signature(function, arguments, beside):
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = typing.get_type_hints(function)
    assert typing.get_type_hints(arguments) == {p.name: hints[p.name] for p in keywords if p.name not in beside}


def test_grad_takes_what_value_and_grad_takes():
    both, alone = (inspect.signature(one) for one in (value_and_grad.value_and_grad, value_and_grad.grad))
    assert alone.parameters == both.parameters


@pytest.mark.parametrize("name, function", list(public_functions()))
def test_every_parameter_and_return_is_annotated(name, function):
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    assert [p.name for p in parameters if p.annotation is p.empty] == []
    assert signature.return_annotation is not signature.empty
    assert typing.get_type_hints(function, inspect.unwrap(function).__globals__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring_with_an_example_that_runs(name):
    text = getattr(jdp, name).__doc__
    first = text.strip().splitlines()[0]
    assert first.endswith((".", "`")) and len(first) < 120
    examples = doctest.DocTestParser().get_examples(text)
    assert [e for e in examples if "import " not in e.source and not e.options.get(doctest.SKIP)]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_wrapper_has_a_docstring(name):
    assert inspect.getdoc(inspect.getattr_static(jdp.DataParallel, name))


NO_VERBS = ("Batches", "Checkpointer", "LossCheck", "Mean", "NNXTrainStep", "Report", "Scattered", "Sum", "TrainState")
NO_VERBS += ("TrainStep", "virtual_cpu_devices")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_VERBS])
def test_a_verb_is_defined_by_an_equation_or_a_source(name):
    text = getattr(jdp, name).__doc__
    assert "Source: " in text and "torch" in text


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_examples_in_the_docstrings_run(path):
    module = importlib.import_module(module_name(path))
    assert module.__doc__, f"{path.name} does not say what it is"
    assert doctest.testmod(module, raise_on_error=True).failed == 0


def test_the_shape_of_the_code():
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert statistics.median(lengths.values()) <= 200
    long = [
        f"{path.name}:{node.name} {length}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (length := body_lines(node)) >= 40
    ]
    assert long == []


def body_lines(node):
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_every_module_of_the_package_says_what_it_is():
    assert all(ast.get_docstring(ast.parse(path.read_text())) for path in MODULES)


def test_the_core_imports_neither_torch_nor_the_tests_tools():
    tools = ("torch", "matplotlib", "hypothesis", "pytest")
    assert python(f"import sys, jdp; jdp.scatter; print([m for m in {tools} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("line", ["--help", "--version", "launch --help", "doctor --help"])
def test_what_a_command_says_of_itself_does_not_wait_for_jax(line):
    given = ["jdp", *line.split()]
    end = f"import sys, atexit; atexit.register(lambda: print('jax' in sys.modules)); sys.argv = {given}"
    said = python(f"{end}; import runpy; runpy.run_module('jdp', run_name='__main__')")
    assert said.splitlines()[-1] == "False" and len(said) > 10


def test_all_of_jdp_is_imported_when_the_first_name_is_asked_for():
    """From then on it is as if `import jdp` had imported all."""
    asked = "print(len(dir(jdp)), len([n for n in jdp.__all__ if n in vars(jdp)]), 'jax' in sys.modules)"
    n = len(jdp.__all__)
    assert python(f"import sys, jdp; {asked}; jdp.Mean; {asked}").splitlines() == [f"{n} 1 False", f"{n} {n} True"]
    starred = "import jdp.distributed; from jdp import *; print(Mean is jdp.Mean, distributed is jdp.distributed)"
    assert python(starred) == "True True"
    with pytest.raises(AttributeError, match="module 'jdp' has no attribute 'scater'"):
        jdp.scater  # noqa: B018
    with pytest.raises(AttributeError, match=r"'train_step'; it is a method of the wrapper.*DataParallel\(model\)"):
        jdp.train_step  # noqa: B018


def test_importing_jdp_does_not_start_jax():
    code = "import jdp; jdp.virtual_cpu_devices(3); import jax; print(len(jax.devices('cpu')))"
    assert python(code) == "3"


def python(code):
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    return run.stdout.strip()
