"""`jdp.DataParallel`: the thin door to all of it.

    data_parallel.py  the class, whose body is its table of contents
    forward.py        one call and its four steps; begin at `apply`
    evaluate.py       a whole data set, in metrics
    prefetch.py       the next batches are scattered while the current one is worked on
    batches.py        data that can be indexed, in batches: every row once an epoch
    rows.py           such data: a tree of arrays, or rows that are stacked
    torch_names.py    names of torch's that it lacks, and what to call instead
    functional.py     `jdp.data_parallel`, the class in one call

It imports `_train` and what that may. Only `jdp/__init__.py` imports it.
"""
