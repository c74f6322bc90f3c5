"""Losses, their gradients, and training steps. Three doors: `value_and_grad`, `train_step` and `parallel`.

What they share comes first:

    terms.py             `jdp.Mean`, `jdp.Sum`, and sums of them with factors
    followed.py          how what a function returns follows the rows: its shapes, and what a scalar is made of
    forms.py             what a function returned, as what adds up and as entries per row
    gradients.py         the gradient on every replica, in microbatches, and its one sum over the replicas
    criterion.py         a loss of all rows: forward on the replicas, the loss once, and back
    shards.py            the same of parameters that are cut over the replicas
    loss.py              a loss function: which of its arguments are whole, cut, differentiated; what it returns
    value_and_grad.py    the first door, and `grad`

The training step:

    step.py              the second door: `TrainStep` for variables, `NNXTrainStep` for an NNX module
    state.py             `jdp.TrainState`, the optimizer's update, and where the optimizer's state lies
    program.py           the step as one compiled program
    deterministic.py     the step as programs for one device each, with the same bits on any number of them
    check.py             `jdp.LossCheck`: compares the loss on several devices with that of one
    nonfinite.py         which replica and which rows made a gradient that is not finite

A step that was written for `jax.pmap`:

    parallel.py          the third door
    parallel_results.py  the rule for each of its results

It imports `_model` and what that may; `_wrapper`, `_explain` and `_plan` may import it.
"""
