"""What `help()` and a hover show: the first lines of each public docstring say how to call it, and an example runs."""

import doctest
import inspect
import re

import pytest

import jdp

# These are called by JAX.
NO_CALLS = {"Scattered.tree_flatten", "Scattered.tree_unflatten"}


def public_methods():
    """Yields each public method of each public class, with its name; those of Flax and of dataclasses left out."""
    for name in jdp.__all__:
        kind = getattr(jdp, name)
        for attribute, member in inspect.getmembers_static(kind) if inspect.isclass(kind) else ():
            is_public = attribute == "__call__" or not attribute.startswith("_")
            method = getattr(member, "__func__", member)
            if isinstance(member, property) and attribute == "init":  # a property that Linen wrappers alone have
                method = member.fget
            of_jdp = (getattr(method, "__module__", None) or "").startswith("jdp")
            if is_public and of_jdp and inspect.isfunction(method) and f"{name}.{attribute}" not in NO_CALLS:
                yield f"{name}.{attribute}", method


METHODS = dict(public_methods())
FUNCTIONS = {name: x for name in jdp.__all__ if inspect.isfunction(x := getattr(jdp, name))}
CLASSES = {name: x for name in jdp.__all__ if inspect.isclass(x := getattr(jdp, name))}
# What a user gets from a call, and does not make: the call.
MADE_BY = {"Batches": "batches", "LossCheck": "check", "NNXTrainStep": "train_step", "Report": "explain"}
MADE_BY |= {"Scattered": "scatter", "TrainState": "init", "TrainStep": "train_step"}
OBJECTS = {"DataParallel.__call__": "dp", "NNXTrainStep.__call__": "step", "TrainStep.__call__": "step"}


def test_all_classes_are_looked_at():
    found = {name.partition(".")[0] for name in METHODS}
    assert found == {"Checkpointer", "DataParallel", "NNXTrainStep", "Report", "TrainStep"}
    assert {"DataParallel.init", "DataParallel.evaluate", "Checkpointer.restore", "TrainStep.check"} <= {*METHODS}
    assert "DataParallel.sow" not in METHODS


@pytest.mark.budget(10)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_an_example_that_runs(name):
    """`doctest.testmod` passes over the methods of a class that is shown under another module's name."""
    (test,) = doctest.DocTestFinder(exclude_empty=False, recurse=False).find(METHODS[name], name, module=False)
    assert [one for one in test.examples if "import " not in one.source]
    doctest.DebugRunner().run(test)


@pytest.mark.parametrize("name", [*METHODS, *FUNCTIONS, *CLASSES])
def test_the_first_five_lines_say_how_to_call_it(name):
    text = inspect.getdoc({**METHODS, **FUNCTIONS, **CLASSES}[name])
    head, called = "\n".join(text.splitlines()[:5]), {**MADE_BY, **OBJECTS}.get(name, name.rpartition(".")[2])
    code = re.findall(r"`([^`]+)`", head)
    assert any(re.search(rf"\b{called}\(", one) for one in code), head
