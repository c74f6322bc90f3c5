"""The algorithm: four verbs over the replicas of a mesh, in the order of a call.

    devices.py         which devices: by index, by name, or all of them
    replica_mesh.py    `ReplicaMesh`: the devices, which axis counts the replicas, which of them are this process's own
    inputs.py          what may be an input: kinds of leaves, axes, rows, names in messages
    layout.py          how a batch lies: torch.chunk's rule, which leaves are cut or replicated, padding
    summary.py         describes a tree in a few lines, without its values
    scattered.py       `Scattered`, a tree with its layout; a call's operands and its signature
    global_arrays.py   builds arrays that span several processes from each process's part, and takes it out again
    agreement.py       the processes agree on a batch: what it is, how many rows each device has
    scatter.py         cuts a batch
    replicate.py       replicates parameters
    shards.py          parameters that are cut over the devices: along which axis, and how a program gathers them
    parallel_apply.py  runs the function on every replica, as one program
    programs.py        the compiled programs: made once per function, few in flight at a time, shown to `explain`
    calls.py           a repeated call goes straight to its program
    unread.py          keeps Python values that a function never reads out of its program
    uneven.py          within the program, where replicas have chunks of different sizes
    turns.py           within the program, where a device has several replicas
    balanced_sum.py    runs each replica alone and adds in one balanced tree: the same bits on any number of devices
    outputs.py         what a replica returns: along which axis each output is gathered, or how it is reduced to one
    gather.py          puts the chunks together
    reduce_add.py      sums over the replicas
    fingerprint.py     compares replicas bit for bit

To follow one call, read the functions `scatter`, `replicate`, `parallel_apply` and `gather`, each in the file of its
name, and come back to the rest when it is named. The package imports `_jax`, `_processes` and `_page`, and of other
projects jax and numpy alone. Every package above it may import it; `_tools/topology` imports only `devices.py`.
"""
