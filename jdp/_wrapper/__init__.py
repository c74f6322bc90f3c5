"""`jdp.DataParallel`, the entry point to all of jdp.

    data_parallel.py  the class, whose body is its table of contents
    forward.py        one call and its four steps; begin at `apply`
    evaluate.py       the metrics of a whole data set
    prefetch.py       scatters the next batches while the current one is in use
    batches.py        makes batches of data that can be indexed: every row once an epoch
    rows.py           such data: a tree of arrays, or rows that are stacked
    torch_names.py    names that torch has and jdp has not, and what to call instead
    functional.py     `jdp.data_parallel`, the class in one call

The package may import `_train` and whatever `_train` may import. `_public.py` and `_tools` import it.
"""
