"""Losses, their gradients and training steps; the entry points are `value_and_grad`, `train_step` and `parallel`.

Modules that the entry points share:

    terms.py             `jdp.Mean`, `jdp.Sum`, and sums of them with factors
    followed.py          how a function's results depend on the rows: their shapes, and what a scalar is computed from
    forms.py             splits what a function returned into sums and entries per row
    gradients.py         the gradient on each replica, in microbatches, and its single sum over the replicas
    criterion.py         a loss of all rows: replicas run forward, the loss is computed once, replicas run backward
    shards.py            the loss of parameters that are cut over the replicas
    loss.py              a loss function: which arguments are replicated, cut or differentiated; what it returns
    value_and_grad.py    `value_and_grad` and `grad`

The training step:

    train_step.py        `train_step`, which makes one of the two steps
    step_options.py      its options, and which of them contradict each other
    step.py              `TrainStep` for variables, and what it shares with the other
    nnx_step.py          `NNXTrainStep` for an NNX module
    state.py             `jdp.TrainState` and the optimizer's update of it
    computation.py       what a step computes, as a pure function of the state and the batch
    program.py           the step as one program: compiled, dispatched, and which arrays it may free
    compiler_options.py  how XLA combines the gradients that are sent, on several GPUs
    state_shardings.py   where the arrays of a state lie, and their bytes on a device
    deterministic.py     the step as single-device programs, with the same bits on any number of devices
    check.py             `jdp.LossCheck`: compares the loss on several devices with the loss on one
    nonfinite.py         which replica and which rows caused a gradient that is not finite

A step that was written for `jax.pmap`:

    parallel.py          `parallel`
    parallel_results.py  how each of its results is reduced or gathered

This package may import `_model` and whatever `_model` may import. `_wrapper` and `_tools` may import it.
"""
