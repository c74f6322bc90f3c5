"""What is wrapped: a Flax Linen module, an NNX module or a function, each as a pure function of its variables.

    config.py           what a wrapper was constructed with, and the kind of its module; how it cuts a batch
    linen.py            Linen: collections in, outputs and updated collections out
    nnx.py              NNX: split into a graph and its state, and updated in place
    sync_batch_norm.py  BatchNorm over the whole batch, of Linen and of NNX

`config.py` imports `linen.py` and `nnx.py`; `nnx.py` imports the other two. What differs between Linen and NNX is
decided here, so that `_core` never sees Flax. The package imports `_core` and what that may. `_train`, `_wrapper` and
`_tools` may import it.
"""
