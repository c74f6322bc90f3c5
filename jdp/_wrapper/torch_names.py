"""Names of torch's, and of a few other libraries', that a wrapper lacks, and what to call instead."""

from __future__ import annotations

_MOVE = (
    "arrays lie on devices, and the wrapper's are fixed when it is made",
    "Choose devices=... at construction, and put parameters there with jdp.replicate(params, devices)",
    "Choose devices=... at construction, which puts the model's state there",
)
_CAST = (
    "arrays have a dtype, and a wrapper has none",
    "Call jax.tree.map(lambda x: x.astype(dtype), params), or give the module a dtype",
    "Call nnx.update(dp.module, jax.tree.map(lambda x: x.astype(dtype), nnx.state(dp.module, nnx.Param))), or give "
    "the layers a dtype",
)
_LEAVES = (
    "parameters are the leaves of a tree",
    "Call jax.tree.leaves(params), or jax.tree_util.tree_leaves_with_path(params) for their names",
    "Call nnx.state(dp.module, nnx.Param), or nnx.to_flat_state of it for their names",
)
_PART = (
    "a wrapper holds one module, which is complete when it is wrapped",
    "Define it in the module: a submodule in setup, state as self.variable('batch_stats', name, init)",
    "Define it in the module's __init__: a submodule as it is, state as an nnx.Variable",
)
_STATE = (
    "what torch keeps in buffers is state next to the parameters",
    "Read the other collections of the variables, such as variables['batch_stats']",
    "Call nnx.state(dp.module, nnx.BatchStat), or with the type of another variable",
)
INSTEAD = {
    "forward": ("a wrapper is called", "Call dp(params, *args); with Linen dp(variables, *args)", "Call dp(*args)"),
    **dict.fromkeys(["to", "cuda", "cpu"], _MOVE),
    **dict.fromkeys(["half", "float", "double", "bfloat16", "type"], _CAST),
    **dict.fromkeys(["buffers", "named_buffers"], _STATE),
    **dict.fromkeys(["add_module", "register_buffer"], _PART),
    "get_parameter": (
        "parameters are the leaves of a tree",
        "Read the leaf by its path, params['Dense_0']['kernel']",
        "Read the field of the module, dp.module.linear.kernel",
    ),
    "training": (
        "a wrapper has no mode of its own",
        "Pass the mode with each call, dp.apply(variables, x, train=False)",
        "Call dp.train() or dp.eval(); what they have set is a field of the layers, dp.module.dropout.deterministic",
    ),
    **dict.fromkeys(["parameters", "named_parameters"], _LEAVES),
    "state_dict": (
        "the state is a tree of arrays, the bare model's own",
        "Save the variables (jdp.Checkpointer), or flax.serialization.to_state_dict(variables)",
        "Save nnx.state(dp.module) (jdp.Checkpointer)",
    ),
    "load_state_dict": (
        "the state is a tree of arrays, the bare model's own",
        "Pass the variables to dp.apply, after flax.serialization.from_state_dict(variables, saved)",
        "Call nnx.update(dp.module, state)",
    ),
    "zero_grad": (
        "a gradient is what a function returns, and nothing adds up",
        *["Call dp.value_and_grad(loss_fn)"] * 2,
    ),
    "no_sync": (
        "gradients are summed once a step, after all microbatches",
        *["Call dp.train_step(..., accumulate_steps=n)"] * 2,
    ),
    "join": (
        "chunks and the batches of processes may differ in size",
        *["Loop over dp.prefetch(loader), which goes on until all processes have run out"] * 2,
    ),
    **dict.fromkeys(
        ["modules", "named_modules", "children", "named_children", "get_submodule"],
        (
            "a wrapper holds one module",
            "Read dp.module; Linen's submodules are there in dp.module.bind(variables)",
            "Call nnx.iter_modules(dp.module)",
        ),
    ),
    "requires_grad_": (
        "what is trained is said where it is trained",
        *["Pass optax.multi_transform(..., labels) as tx, with optax.set_to_zero() for what is frozen"] * 2,
    ),
    **dict.fromkeys(
        ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
        (
            "a call is one program, and no hook runs inside",
            "Return what you need, or self.sow('intermediates', name, x) in the module",
            "Return what you need, or self.sow(nnx.Intermediate, name, x) in the module",
        ),
    ),
    **dict.fromkeys(
        ["device_ids", "src_device_obj"],
        ("devices are jax.Device objects", *["Read dp.devices; the first is the primary device"] * 2),
    ),
    "num_devices": ("the devices are a tuple", *["Read len(dp.devices)"] * 2),
    "share_memory": (
        "one process drives all devices of its host, and shares no arrays with others",
        *["Leave it out; several processes are started by jdp launch, and each makes a wrapper"] * 2,
    ),
    "compile": (
        "each call is compiled already, once for each shape of its batch",
        *["Leave it out; jax.jit compiles what is around the call, too"] * 2,
    ),
    "register_comm_hook": (
        "gradients are summed inside of the step's program",
        *["Call dp.train_step(..., reduce_dtype=jnp.bfloat16), which sends them in 16 bits"] * 2,
    ),
    "apply_fn": (
        "the state of a step holds arrays and no function",
        "Call dp.apply(variables, x)",
        "Call dp(x)",
    ),
}
"""For each name: how it is in JAX, what to do instead with Linen and functions, and what to do with NNX."""
TORCHS = "torch's"
OWNERS = {"apply_fn": "Flax's", "num_devices": "Lightning's"}
"""The names that are not torch's, and whose they are."""
