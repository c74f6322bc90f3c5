"""Mutants: small bugs that somebody could make in jdp, and whether a test fails for each.

    python tests/mutants.py                       puts in one after the other, and counts those that a test catches
    python tests/mutants.py --list                the mutants, and what each breaks
    python tests/mutants.py --only NAME ...       some of them
    python tests/mutants.py --whole --tier full   before a mutant counts as missed, all tests of two tiers

It works on a copy of the checkout. For each mutant it runs the tests that are named for it, only if those pass the
folder of its wing and the laws, and with `--whole` all tests of the tier. A test that catches a mutant must pass
without it: all these are run once more at the end. `MUTANTS_PYTEST` is the command in place of `python -m pytest`; what
it waits before pytest begins does not count.
"""

import argparse
import math
import os
import pathlib
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
# As make test, make test-full and make test-faults; each after those before it.
TIERS = {"fast": [], "full": ["-m", "(full or hypothesis) and not faults"], "faults": ["-m", "faults"]}
# It fails for every mutant, whose text is not the one that it looks for.
NEVER = ["--ignore", "tests/repository/test_mutants.py"]


class Mutant(NamedTuple):
    """One bug: `new` in the place of `old`, which stands once in the file."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    """To be tried first: `file::function` below `tests/`."""

    def text(self, folder: pathlib.Path = ROOT) -> str:
        """The file with the bug in it."""
        found = (folder / self.file).read_text(encoding="utf-8")
        if found.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {found.count(self.old)} times in {self.file}")
        return found.replace(self.old, self.new)


MUTANTS = (
    # ------------------------------------------------------------------------------------------------------- core
    Mutant(
        "chunk-size",
        "jdp/_core/layout.py",
        "each = -(-size // n)",
        "each = size // n + 1",
        "a batch that divides is cut as if it had one row more",
        ("core/test_scatter.py::test_chunk_sizes_are_torch_s",),
    ),
    Mutant(
        "static-type",
        "jdp/_core/layout.py",
        "= type(value), repr(value) if isinstance(value, float | complex) else value",
        "= (repr(value) if isinstance(value, float | complex) else value,)",
        "1 and True among the arguments run one program",
        ("core/test_parallel_apply.py::test_equal_python_scalars_of_different_types_are_not_confused",),
    ),
    Mutant(
        "padding-stays",
        "jdp/_core/scattered.py",
        "if isinstance(leaf, Cut) and leaf.sizes[i] != local.shape[leaf.axis]:",
        "if isinstance(leaf, Cut) and leaf.sizes[i] > local.shape[leaf.axis]:",
        "a replica with a short chunk sees the rows of padding",
        ("core/test_parallel_apply.py::test_each_replica_sees_the_true_size_of_its_chunk",),
    ),
    Mutant(
        "key-of-primary",
        "jdp/_core/scattered.py",
        "return jnp.where(index == 0, x, jax.random.fold_in(x, index))",
        "return jax.random.fold_in(x, index)",
        "the primary replica draws other numbers than the bare model",
        ("core/test_parallel_apply.py::test_a_0_d_key_is_folded_with_the_replica_s_index_but_for_the_primary",),
    ),
    Mutant(
        "idle-between",
        "jdp/_core/scattered.py",
        "x = x[: len(used)] if used == tuple(range(len(used))) else x[np.array(used)]",
        "x = x[: len(used)]",
        "numbers of replicas are taken from an idle one that stands before them",
        ("core/test_gather.py::test_0_d_outputs_of_idle_replicas_are_absent",),
    ),
    Mutant(
        "layout-without-tree",
        "jdp/_core/scatter.py",
        "key = (treedef, *key_of_leaves)",
        "key = tuple(key_of_leaves)",
        "the layout of a batch is taken for another tree of equal arrays",
        ("test_laws.py::test_law_3_equal_arrays_in_other_trees_and_beside_other_values",),
    ),
    Mutant(
        "mean-of-replicas",
        "jdp/_core/outputs.py",
        "mine = jnp.asarray(rows / rows.sum(), ",
        "mine = jnp.asarray((rows > 0) / (rows > 0).sum(), ",
        "the mean of state forgets how many rows each replica has",
        ("model/test_state.py::test_mean_is_weighted_by_rows_and_integers_are_the_primarys",),
    ),
    Mutant(
        "state-of-no-rows",
        "jdp/_core/uneven.py",
        "jnp.zeros(shape, x.dtype) if rule.old is None else _as_dtype(operands[rule.old], x.dtype)",
        "jnp.zeros(shape, x.dtype)",
        "a batch of no rows sets the state to zero",
        ("core/test_uneven.py::test_zero_rows_leave_the_state_as_it_was_to_the_last_bit",),
    ),
    Mutant(
        "filled-with-zeros",
        "jdp/_core/uneven.py",
        "first = jax.lax.slice_in_dim(x, 0, 1, axis=leaf.axis)",
        "first = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=leaf.axis))",
        "rows of zeros fill chunks up, and may give a NaN to the gradient",
        ("core/test_uneven.py::test_what_replicas_are_filled_up_with_shows_nowhere",),
    ),
    Mutant(
        "places-along-the-rows",
        "jdp/_jax/row_places.py",
        "return lambda e: _elementwise(e) and e.j not in jax.tree.leaves(e.params[key])",
        "return lambda e: _elementwise(e)",
        "what is sorted or turned over along the rows counts as kept in its place",
        ("jax/test_row_places.py::test_what_mixes_rows_is_told",),
    ),
    Mutant(
        "places-of-literals",
        "jdp/_jax/row_places.py",
        "return is_literal(v) and is_literal(w) and _is_same(read({}, v), read({}, w))",
        "return is_literal(v) and is_literal(w)",
        "a function may ask for the number of rows, and be given more of them",
        ("jax/test_row_places.py::test_what_mixes_rows_is_told",),
    ),
    Mutant(
        "places-of-derivatives",
        "jdp/_jax/row_places.py",
        "_read_jaxprs(_derivative(e), _derivative(f), rows, True)",
        "pass",
        "a custom derivative may mix rows",
        ("jax/test_row_places.py::test_what_mixes_rows_is_told",),
    ),
    Mutant(
        "places-of-rbg",
        "jdp/_jax/row_places.py",
        'return bool(is_by_place) and bool(keys) and all("fry" in str(aval.dtype) for aval in keys)',
        "return bool(is_by_place)",
        "a generator that draws all numbers at once is given more rows",
        ("jax/test_row_places.py::test_random_numbers_of_rbg",),
    ),
    Mutant(
        "idle-added",
        "jdp/_core/reduce_add.py",
        "out.append(x[used].sum(0, dtype=x.dtype))",
        "out.append(x.sum(0, dtype=x.dtype))",
        "replicas without rows are added, too",
        ("core/test_reduce_add.py::test_what_is_whole_is_added_once_for_each_replica_with_rows",),
    ),
    Mutant(
        "oldest-goes",
        "jdp/_core/programs.py",
        "            self.move_to_end(key)\n",
        "            self[key]\n",
        "the program that was made first is dropped, though it is used in every step",
        ("core/test_memory.py::test_what_is_dropped_is_what_was_not_used_for_longest",),
    ),
    Mutant(
        "one-leaf-agrees",
        "jdp/_core/fingerprint.py",
        "if (least == ~most).all():",
        "if (least == ~most).any():",
        "replicas that differ pass where any of their leaves agrees",
        ("core/test_check_replicas.py::test_one_ulp_on_one_device_is_named",),
    ),
    Mutant(
        "one-leaf-in-place",
        "jdp/_core/programs.py",
        "lies and found.count(found[0]) == len(found)",
        "mesh.replicated in found",
        "parameters of which one leaf is on all devices are taken as they are",
        ("core/test_replicate.py::test_one_leaf_out_of_place_moves_alone",),
    ),
    # ------------------------------------------------------------------------------------------------------ train
    Mutant(
        "short-chunk-weighs-as-much",
        "jdp/_train/gradients.py",
        "return one(number, part, state, size, size / unit)",
        "return one(number, part, state, size, 1.0)",
        "the gradient is a mean of the replicas' means",
        ("train/test_value_and_grad.py::test_the_mean_over_any_batch_is_exact",),
    ),
    Mutant(
        "microbatch-along-rows",
        "jdp/_train/gradients.py",
        "x = jax.lax.dynamic_slice_in_dim(x, start * times, size * times, axis=leaf.axis)",
        "x = jax.lax.dynamic_slice_in_dim(x, start * times, size * times, axis=0)",
        "microbatches of what is cut along another axis are cut along the first",
        ("train/test_value_and_grad.py::test_microbatches_of_another_axis",),
    ),
    Mutant(
        "axes-inside-of-a-replica",
        "jdp/_core/replica_mesh.py",
        "if name in self.inner_axes)",
        "if name)",
        "a constraint on the rows, which JAX refuses inside of a replica of several devices, is not left out",
        ("mesh/test_calls.py::test_outputs_and_gradients_are_those_of_one_device",),
    ),
    Mutant(
        "parts-of-replicas",
        "jdp/_core/fingerprint.py",
        "if is_cut.any():",
        "if is_cut.all():",
        "the parts of a parameter inside of a replica are compared with one another",
        ("mesh/test_training.py::test_replicas_that_differ_are_named",),
    ),
    Mutant(
        "moments-inside-of-a-replica",
        "jdp/_train/state_shardings.py",
        "if found is not None and shape == jnp.shape(x):",
        "if found is not None and shape == ():",
        "the moments of a parameter that is cut inside of a replica are whole on each of its devices",
        ("mesh/test_training.py::test_a_step_is_that_of_one_device",),
    ),
    Mutant(
        "replica-of-a-device",
        "jdp/_core/turns.py",
        "index = device * layout.per_device + number",
        "index = device + layout.mesh.size * number",
        "a device has every n-th replica, and not consecutive ones",
        ("wrapper/test_replicas.py::test_a_function_gives_what_it_gives_on_as_many_devices",),
    ),
    Mutant(
        "axis-of-the-devices",
        "jdp/_core/uneven.py",
        "return [(signature.axis_name, len(layout.devices))] if layout.per_device > 1 else None",
        "return None",
        "pmean divides by the number of devices, where there are more replicas",
        ("wrapper/test_replicas.py::test_a_model_sees_an_axis_with_as_many_members",),
    ),
    Mutant(
        "primary-among-devices",
        "jdp/_core/outputs.py",
        "primary, _ = layout.primary",
        "primary = layout.used[0] if layout.used else 0",
        "the primary's state is looked for on the device with its number",
        ("wrapper/test_replicas.py::test_a_scatter_of_ones_own_may_leave_the_first_replicas_idle",),
    ),
    Mutant(
        "key-of-microbatch",
        "jdp/_train/gradients.py",
        "jax.random.fold_in(x, len(signature.layout.devices) + number)",
        "jax.random.fold_in(x, number)",
        "a microbatch of the primary draws what a replica draws",
        (
            "test_laws.py::test_law_2_a_key_for_each_step_microbatch_and_replica",
            "train/test_value_and_grad.py::test_every_microbatch_of_every_replica_draws_its_own_numbers",
        ),
    ),
    Mutant(
        "state-of-last-microbatch",
        "jdp/_train/gradients.py",
        "last = one(whole, whole * size, rest, done.state)",
        "last = one(whole, whole * size, rest, state)",
        "the last, shorter microbatch begins with the state from before the others",
        ("test_laws.py::test_law_2_state_goes_through_the_microbatches",),
    ),
    Mutant(
        "sum-of-16-bits",
        "jdp/_train/gradients.py",
        "if wire else dtype if dtype.itemsize < 4 else None",
        "if wire else None",
        "gradients of float16 are divided when their sum has left its range",
        ("train/test_value_and_grad.py::test_float16_gradients_of_any_mean_in_range_are_in_range",),
    ),
    Mutant(
        "mean-in-a-replica",
        "jdp/_train/value_and_grad.py",
        "value = finished(loss) if is_term(loss) else number",
        "value = number",
        "a jdp.Mean inside of another replica's program is not divided",
        ("train/test_value_and_grad.py::test_inside_another_replica_it_runs_directly",),
    ),
    Mutant(
        "skipped-step-counts",
        "jdp/_train/computation.py",
        "new_state, count = choose(new_state, state.state), choose(count, state.step)",
        "new_state = choose(new_state, state.state)",
        "a step that is skipped is counted, so that the next has another key",
        ("train/test_train_step.py::test_a_step_that_is_not_finite_leaves_all_as_it_was",),
    ),
    Mutant(
        "donated-of-the-caller",
        "jdp/_train/program.py",
        "return jnp.copy(x) if isinstance(x, jax.Array) and not isinstance(x, Tracer) else x",
        "return x",
        "a step frees arrays that the caller put into the state",
        ("train/test_donation.py::test_a_state_made_by_hand_stays_and_trains_alike",),
    ),
    Mutant(
        "result-of-the-primary",
        "jdp/_train/parallel_results.py",
        "return Marked(x.value, gathered if axis is None else axis, reduce)",
        "return Marked(x.value, axis, reduce)",
        "of a result that differs between replicas only the primary's comes back",
        ("train/test_parallel_state.py::test_a_result_that_is_no_state_is_gathered_or_refused",),
    ),
    # ---------------------------------------------------------------------------------------------------- wrapper
    Mutant(
        "known-of-another-module",
        "jdp/_core/calls.py",
        "if not self or module is not self._module or not trace_state_clean():",
        "if not self or not trace_state_clean():",
        "a module that takes the place of another is not run",
        ("wrapper/test_known_calls.py::test_a_module_that_takes_the_place_of_another",),
    ),
    Mutant(
        "known-of-moved-parameters",
        "jdp/_core/calls.py",
        "if not _are(found, moved) or not (lie or mesh.inner_axes) or not is_plain():",
        "if not (lie or mesh.inner_axes) or not is_plain():",
        "a call whose parameters had to be moved is not known",
        ("train/test_known_gradients.py::test_parameters_on_the_host_beside_a_mesh_of_several_axes",),
    ),
    Mutant(
        "axis-of-keywords",
        "jdp/_wrapper/forward.py",
        "axes = (tuple(in_axes), config.dim)",
        "axes = (tuple(in_axes), 0)",
        "with in_axes, keyword arguments are cut along the first axis, whatever dim is",
        ("wrapper/test_data_parallel.py::test_keywords_are_cut_along_dim",),
    ),
    Mutant(
        "state-to-the-output-device",
        "jdp/_wrapper/forward.py",
        "return dp.gather(out, device), join(state, home)",
        "return dp.gather(out, device), join(state, device)",
        "state goes where outputs go, and no more where the parameters live",
        ("model/test_state.py::test_state_ignores_the_output_device",),
    ),
    Mutant(
        "buffer-of-the-loader",
        "jdp/_wrapper/prefetch.py",
        "else _copy(x)  # scatter",
        "else x  # scatter",
        "a batch that waits changes when the loader uses its buffer again",
        ("wrapper/test_prefetch.py::test_a_loader_may_use_its_buffer_again",),
    ),
    Mutant(
        "same-order-in-each-epoch",
        "jdp/_wrapper/batches.py",
        "PCG64(np.random.SeedSequence([seed, epoch]))).permutation(count)",
        "PCG64(np.random.SeedSequence(seed))).permutation(count)",
        "the rows come in the same order in each epoch",
        ("wrapper/test_batches.py::test_every_row_once_an_epoch_in_the_order_of_numpy",),
    ),
    # ------------------------------------------------------------------------------------------------------ model
    Mutant(
        "state-of-the-primary",
        "jdp/_model/linen.py",
        "return Marked(x, None, reduce, old, alone=alone)",
        'return Marked(x, None, "primary", old, alone=alone)',
        'reduce_state="mean" keeps the primary replica\'s state',
        ("model/test_state.py::test_mean_is_weighted_by_rows_and_integers_are_the_primarys",),
    ),
    Mutant(
        "path-of-a-filter",
        "jdp/_model/nnx.py",
        "return lambda path, variable: accepts(path[1:], variable)",
        "return lambda path, variable: accepts(path, variable)",
        "a filter of state_axes sees a number before the path of the model",
        ("model/test_nnx.py::test_a_cache_that_any_filter_names",),
    ),
    Mutant(
        "statistics-without-weights",
        "jdp/_model/sync_batch_norm.py",
        "[x * jnp.asarray(weight, x.dtype) for x in wide]",
        "wide",
        "synchronised statistics are a mean of the replicas' means",
        ("model/test_sync_batch_norm.py::test_params_and_statistics_are_those_of_the_whole_batch",),
    ),
    Mutant(
        "layouts-of-another-door",
        "jdp/_model/config.py",
        "return self.batch_layouts if in_axes is None else Layouts()",
        "return self.batch_layouts",
        "a step with in_axes of its own cuts a batch as the wrapper cut one of its shapes before",
        ("train/test_arguments.py::test_what_the_wrapper_has_cut_a_step_cuts_along_its_own_axis",),
    ),
    # -------------------------------------------------------------------------------------------------- processes
    Mutant(
        "order-of-the-gathered",
        "jdp/_core/agreement.py",
        "self.places = np.argsort(self._order)",
        "self.places = self._order",
        "the rows of one replica are taken for those of another",
        ("processes/test_exchange.py::test_what_a_process_leaves_is_bounded",),
    ),
    Mutant(
        "digest-of-containers",
        "jdp/_core/agreement.py",
        "hashlib.sha256(repr(outline).encode())",
        "hashlib.sha256(repr(outline[:1]).encode())",
        "processes whose batches have other shapes or dtypes are taken for alike",
        ("processes/test_processes.py::test_refused",),
    ),
    Mutant(
        "job-of-one",
        "jdp/_processes/launchers.py",
        "return [name for name in SIZES if (number(name) or 1) > 1]",
        "return [name for name in SIZES if (number(name) or 0) > 0]",
        "a launcher that started one process is an error",
        ("processes/test_processes.py::test_one_process_needs_no_job",),
    ),
    # ------------------------------------------------------------------------------------------------- checkpoint
    Mutant(
        "manifest-unverified",
        "jdp/_checkpoint/read.py",
        "if digest(content) != told:",
        "if not told:",
        "a manifest that was changed on the disk is believed",
        ("checkpoint/test_checkpointer.py::test_the_newest_intact_one_is_restored_and_the_warning_names_the_other",),
    ),
    Mutant(
        "intact-one-deleted",
        "jdp/_checkpoint/write.py",
        "            if step != whole:\n",
        "            if step != steps[-1]:\n",
        "the one checkpoint that can be read back is deleted for damaged ones",
        ("checkpoint/test_checkpoint_directory.py::test_keep_leaves_the_newest_intact_one",),
    ),
    Mutant(
        "sigterm-between",
        "jdp/_checkpoint/checkpointer.py",
        "if not ending and step % self._every:",
        "if step % self._every:",
        "after a SIGTERM the job trains on to the next multiple of every",
        ("checkpoint/test_checkpointer.py::test_sigterm_saves_the_step_and_ends",),
    ),
    # ----------------------------------------------------------------------- launch, explain, plan, doctor and jax
    Mutant(
        "exit-code-of-a-signal",
        "jdp/_launch/cli.py",
        "return code if code >= 0 else 128 - code",
        "return code if code >= 0 else 128 + code",
        "the launcher's exit code for a killed rank is 119, and not 137",
        ("launch/test_launch.py::test_a_killed_rank_is_named",),
    ),
    Mutant(
        "runs-of-a-loop",
        "jdp/_tools/explain/collectives.py",
        "times = None if runs is None or times is None else runs * times",
        "times = None if runs is None or times is None else times",
        "a collective in a loop in a loop is counted for the inner one alone",
        ("explain/test_collectives.py::test_in_a_loop_it_runs_as_often_as_the_loop",),
    ),
    Mutant(
        "a-loop-drawn-once",
        "jdp/_tools/explain/estimate.py",
        "[span.stretched(before.seconds, times) for",
        "[span.stretched(before.seconds, 1) for",
        "a report draws a loop as long as one iteration, and what is exposed is less than it says",
        ("explain/test_schedule.py::test_the_spans_of_a_loop_are_drawn_out_to_its_length",),
    ),
    Mutant(
        "levels-in-turn",
        "jdp/_tools/explain/estimate.py",
        "return _TIMES[kind] * (max(local, remote) + hops)",
        "return _TIMES[kind] * (local + remote + hops)",
        "a collective over hosts takes the time within and between them one after the other",
        ("explain/test_links.py::test_between_hosts_the_network_cards_decide",),
    ),
    Mutant(
        "left-out-is-well",
        "jdp/_tools/doctor/cli.py",
        '{"ok": not (failed or left_out or problems), ',
        '{"ok": not failed, ',
        "the doctor's exit code is 0 though a machine has problems",
        ("doctor/test_doctor.py::test_gpus_that_jax_does_not_use_are_a_problem_and_the_exit_code_tells",),
    ),
    Mutant(
        "transposed-back",
        "jdp/_jax/convolutions.py",
        "        back[axis] = position\n",
        "        back[position] = axis\n",
        "the axes of a convolution in a loop come back in another order",
        ("jax/test_convolutions.py::test_outputs_and_gradients_are_the_same_in_a_loop",),
    ),
)


# A name may have " - " among its parameters, as it has before what went wrong.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[^\s:]+(?:::\w+)*(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


class Run(NamedTuple):
    """What became of a run of pytest."""

    tier: str
    seconds: float
    failed: tuple[str, ...] = ()
    is_over: bool = True
    """Whether it ended in time."""


def copied(folder: pathlib.Path) -> None:
    """The checkout as it is now, without what git ignores; programs that are compiled are kept in one place."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (ROOT / ".jax_cache").mkdir(exist_ok=True)
    (folder / ".jax_cache").symlink_to(ROOT / ".jax_cache")


def named(tests: Sequence[str]) -> list[str]:
    """Arguments of pytest for `file::function`s."""
    files = dict.fromkeys("tests/" + test.partition("::")[0] for test in tests)
    return [*files, "-k", " or ".join(test.partition("::")[2] for test in tests)]


def stages(mutant: Mutant, tier: str, whole: bool, workers: int) -> Iterator[tuple[str, list[str]]]:
    """What is run for a mutant, one after the other, until a test fails: tiers and arguments of pytest."""
    many = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
    wing = mutant.file.split("/")[-2].strip("_")
    for chosen in [*TIERS][: [*TIERS].index(tier) + 1]:
        yield chosen, named(mutant.tests)
        yield chosen, [f"tests/{wing}", "tests/test_laws.py", *many]
        if whole:
            yield chosen, ["tests", *many]


def tested(folder: pathlib.Path, tier: str, arguments: Sequence[str], seconds: float) -> Run:
    """Runs pytest in the copy, for so many seconds at most."""
    command = shlex.split(os.environ.get("MUTANTS_PYTEST", "")) or [sys.executable, "-m", "pytest"]
    # One -v against the -q of pyproject.toml: pytest says when it begins, for the command may wait for its turn first.
    command += ["-v", "-p", "no:cacheprovider", *NEVER, *TIERS[tier], *arguments]
    environ = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONUNBUFFERED": "1",
        "JDP_TESTS_ARE_JUDGED": "0",  # programs that only a mutant has are compiled anew
    }
    pytest = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert pytest.stdout is not None
    said, begun = b"", math.inf
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pytest.stdout, selectors.EVENT_READ)
            while True:
                left = None if math.inf in (begun, seconds) else max(0.0, begun + seconds - time.monotonic())
                if not selector.select(left):
                    return Run(tier, seconds, is_over=False)
                if not (some := os.read(pytest.stdout.fileno(), 1 << 16)):
                    break
                said += some
                begun = min(begun, time.monotonic())
        code = pytest.wait()
    finally:
        if pytest.poll() is None:
            os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
        pytest.stdout.close()
    text, took = said.decode(errors="replace"), time.monotonic() - begun
    if code in (0, 5):  # all pass, or there are none in this tier
        return Run(tier, took)
    if failed := _FAILED.findall(text):
        return Run(tier, took, tuple(failed))
    if code == 1 and "+ Timeout +" in text or code < 0:  # it hung, or has ended the process
        return Run(tier, took, ("(a test has ended pytest)",))
    raise SystemExit(f"pytest {shlex.join(arguments)} ended with code {code}:\n{text[-2000:]}")


def caught(folder: pathlib.Path, mutant: Mutant, options: argparse.Namespace) -> Run:
    """The run in which a test fails with the mutant in the copy, or the last one; with the seconds of all."""
    path, took = folder / mutant.file, 0.0
    right = path.read_bytes()
    path.write_text(mutant.text(folder), encoding="utf-8")
    try:
        for tier, arguments in stages(mutant, options.tier, options.whole, options.workers):
            run = tested(folder, tier, [*arguments, "-x"], options.limit - took)
            took += run.seconds
            if run.failed or not run.is_over:
                break
    finally:
        path.write_bytes(right)
    return run._replace(seconds=took)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[m.name for m in MUTANTS], help="some of them")
    parser.add_argument("--whole", action="store_true", help="run all tests before a mutant counts as missed")
    parser.add_argument("--tier", choices=[*TIERS], default="fast", help="full: the fast tests, then the others")
    parser.add_argument("--least", type=int, help="exit with code 1 where fewer are caught (default: all of them)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a mutant (default: %(default)g)")
    parser.add_argument("--workers", type=int, default=1, help="of pytest -n, but for the named tests")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only is None or m.name in options.only]
    if options.list:
        for m in chosen:
            print(f"{m.name:28}{m.file:34}{m.breaks}")
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # with pytest, and without the copy
    found: dict[str, str] = {}
    catching: dict[str, set[str]] = {tier: set() for tier in TIERS}
    with tempfile.TemporaryDirectory(prefix="jdp-mutants-") as name:
        folder = pathlib.Path(name)
        copied(folder)
        for m in chosen:
            run = caught(folder, m, options)
            if run.failed:
                found[m.name] = run.failed[0]
                catching[run.tier].update(test for test in run.failed[:1] if "::" in test)
            said = found.get(m.name, "NOT CAUGHT" if run.is_over else f"NOT KNOWN after {options.limit:g} s")
            print(f"{m.name:28}{run.seconds:6.0f} s  {said}", flush=True)
        for tier, tests in catching.items():
            # What fails without a mutant as well has caught none.
            run = tested(folder, tier, sorted(tests), math.inf) if tests else Run(tier, 0.0)
            for test in run.failed:
                print(f"{test} fails without a mutant, too")
                found = {name: by for name, by in found.items() if by != test}
    print(f"caught {len(found)} of {len(chosen)}")
    return int(len(found) < (len(chosen) if options.least is None else options.least))


if __name__ == "__main__":
    sys.exit(main())
