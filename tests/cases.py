"""Which cases of a test are run, of one `parametrize` list or of several."""

import itertools

import pytest


def one_in(n, cases):
    """Each of the cases for a `parametrize`; the fast tier has the first of each n."""
    return [pytest.param(case, marks=[pytest.mark.full] * (i % n > 0)) for i, case in enumerate(cases)]


def some_of(cases, size, have=()):
    """Some of the cases, among which are all that stands together in a case, `size` entries at a time.

    An entry is that of a `parametrize`, or the value of a fixture. With a size of 1 each entry is there (`each_value`),
    with 2 each pair of entries of two lists (`each_pair`): most faults of options are made by one of them or by two
    together, and a product of three lists has several times as many cases as pairs need. `have` are run in any case.
    """
    entries = {case: set(_together(case, size)) for case in cases}
    left = set().union(*entries.values()).difference(*(entries[case] for case in have))
    while left:
        best = max(cases, key=lambda case: len(left & entries[case]))
        left -= entries[best]
        yield best


def _together(case, size):
    """So many entries of a case, or fewer: a test may have one list."""
    entries = [*_entries(case)]
    return itertools.chain.from_iterable(itertools.combinations(entries, k) for k in range(1, size + 1))


def _entries(case):
    """What a case has of each `parametrize`: the names, and the values that stand together in its list."""
    values = dict(case.callspec.params)
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple(names), tuple(id(values.pop(name)) for name in names)
    for name, value in values.items():  # of fixtures
        yield name, id(value)
