"""The programs that benchmarks/peers.py lets race: each file without a leading underscore is one peer.

A peer has one function, `trainer(task)`, which gives `train(batches)`, the loop over batches that a user of it writes,
done when it returns, and `params()`, what it has learnt so far, under the names of `_tasks.LAYERS`. It uses every
device there is. A comment `# parallel` ends every line that the same program for one device would not have, or not so;
they are counted.
"""
