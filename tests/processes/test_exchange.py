"""What the processes leave in JAX's coordination service for each other, here in a job of one process."""

import os
import subprocess
import sys

from laws import free_port

PUBLISHES = """
import sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
from jdp._processes.coordination import client
from jdp._processes import exchange
exchange._PUBLISHED = 3
group = exchange.exchange_of((0,))

def kept():
    return sorted(key.rpartition("/")[2] for key, _ in client().key_value_dir_get("jdp/all/batch/0"))

for name in "abcdef":
    group.publish_once(f"batch/0/{name}", f"the batch {name}")
    group.publish_once("batch/0/a", "the batch a")
print(*kept())
group.publish_once("batch/0/b", "the batch b")  # which was deleted
print(*kept(), group.read("batch/0/b", 5))
"""


def test_what_a_process_publishes_is_bounded():
    """Python values that change with every batch are a new text each: the service would keep all of them."""
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PUBLISHES, str(free_port())], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.stdout.splitlines() == ["a e f", "a b f the batch b"], done.stderr[-2000:]
