"""What was saved comes back bit for bit, on any number of devices; and what is damaged never does."""

import contextlib
import gc
import io
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp
from jdp._checkpoint.directory import absolute, remove_unfinished
from jdp._checkpoint.items import digest

KEY = jax.random.key(5)


def state_of(seed, where=None, cut=None):
    """A state with leaves of all kinds, as numpy knows it; on the devices if `where` is given."""
    rng = np.random.default_rng(seed)
    state = {
        "w": rng.normal(size=(16, 3)).astype(np.float32),
        "half": rng.normal(size=8).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
        "count": np.int32(seed),
        "flags": np.array([True, False]),
        "complex": np.complex64([1 + 2j]),
        "a/b.c['d']": [rng.integers(0, 9, 5).astype(np.int8), (np.float32(seed),)],
    }
    if where is not None:
        state = {k: jax.device_put(v, cut if k == "w" and cut else where) for k, v in state.items()}
        state["key"] = jax.device_put(jax.random.fold_in(KEY, seed), where)
        state["host"] = np.arange(3) + 2**40
        state["number"] = seed
    return state


@pytest.fixture(scope="module", autouse=True)
def no_wrappers_of_other_tests():
    """A checkpoint says how many replicas the wrappers that are alive have; those of other files wait to be freed."""
    gc.collect()


@pytest.fixture
def spread(devices):
    """`spread(n)`: (replicated, cut) over n devices."""

    def spread(n):
        mesh = Mesh(np.array(devices[:n]), ("data",))
        return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    return spread


def on_host(tree):
    """A copy of the values as numpy has them."""

    def leaf(x):
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x)

    return jax.tree.map(leaf, tree)


def assert_equal(got, want):
    """Equal structures, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        assert g.tobytes() == w.tobytes()


@pytest.mark.one_case
@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("n", [1, 8])
def test_a_state_comes_back_on_any_number_of_devices(tmp_path, spread, n, m):
    state = state_of(3, *spread(n))
    want = on_host(state)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(3, state, {"position": 7, "seeds": [1, 2.5, None], "name": "é"})
    like = state_of(9, *spread(m))
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step == 3
        got, data = checkpointer.restore(like)
    assert data == {"position": 7, "seeds": [1, 2.5, None], "name": "é"}
    assert_equal(on_host(got), want)
    for g, s in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
        assert type(g) is type(s)
        if isinstance(g, jax.Array):
            assert g.sharding == s.sharding and g.committed == s.committed


STRANGE = {
    "uint4": jnp.ones(3, "uint4"),
    "object": 2**70,  # an int of more than 64 bits
    ">f4": np.ones(3, ">f4"),
    str(np.dtype(np.longdouble)): np.ones(3, np.longdouble),
    "[('a', '<f4')]": np.zeros(2, [("a", "f4")]),
}


def test_what_takes_the_dtype_of_others_still_does(tmp_path, spread):
    """`jnp.full(3, 0.5)` times bfloat16 is bfloat16, also after a restart: it is weakly typed."""
    whole, cut = spread(4)
    scale, loss_scale = jnp.full((8, 3), 0.5), jnp.asarray(2.0**15)
    state = {"here": scale, "whole": jax.device_put(scale, whole), "cut": jax.device_put(scale, cut), "n": loss_scale}
    with jdp.Checkpointer(tmp_path) as checkpoints, jax.transfer_guard("disallow"):
        checkpoints.save(1, state)
        with jax.set_mesh(jax.make_mesh((2,), ("other",))):
            back, _ = checkpoints.restore(state)
    for path, x in back.items():
        assert x.weak_type and (x * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16, path
        assert (x == state[path]).all() and x.committed == state[path].committed
        assert x.sharding == state[path].sharding, path


@pytest.mark.parametrize(("dtype", "x"), STRANGE.items(), ids=["uint4", "int", "big-endian", "long", "structured"])
def test_a_dtype_that_no_file_holds_is_refused_by_its_leaf(tmp_path, refused, dtype, x):
    match = rf"\['w'\] is of dtype {re.escape(dtype)}; "
    with jdp.Checkpointer(tmp_path) as checkpointer, refused(TypeError, "Checkpointer", match=match):
        checkpointer.save(1, {"n": 1, "w": x})
    assert not os.listdir(tmp_path)


def test_a_save_that_has_failed_is_heard_of_in_the_next_step(tmp_path, monkeypatch):
    """And not only when the next one is due."""
    with jdp.Checkpointer(tmp_path, every=5) as checkpointer:
        checkpointer.save(5, {"w": np.ones(2)})
        checkpointer._writer._thread.join()
        monkeypatch.setattr(checkpointer._writer, "_failure", OSError("the disk is full"))
        with pytest.raises(RuntimeError, match="the disk is full"):
            checkpointer.save(6, {"w": np.ones(2)})
        assert not checkpointer.save(7, {"w": np.ones(2)})


def test_a_freed_state_is_refused_and_damages_nothing(tmp_path, refused):
    """The state that a step has freed, as the one to restore into."""
    state, freed = ({"n": 1, "w": jnp.arange(3.0) + i} for i in (0, 1))
    freed["w"].delete()
    with jdp.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with refused(RuntimeError, "Checkpointer", match=r"state\['w'\] has been freed"):
            checkpointer.restore(freed)
        assert checkpointer.latest_step == 2
        found, _ = checkpointer.restore({"n": 0, "w": jnp.zeros(3)})
        np.testing.assert_array_equal(found["w"], np.arange(3.0))
        checkpointer.save(3, found)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]


def test_a_transfer_guard_is_for_the_users_transfers(tmp_path, spread):
    """Under it no checkpoint counts as damaged: old ones are deleted, and the newest is restored."""
    state = state_of(1, *spread(4))
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with jdp.Checkpointer(tmp_path, keep=1) as saved:
            for step in (1, 2, 3):
                saved.save(step, state)
            saved.wait()
            assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["3"]
            got, _ = saved.restore(state)
    finally:
        jax.config.update("jax_transfer_guard", None)
    assert got["w"].sharding == state["w"].sharding
    np.testing.assert_array_equal(got["w"], state["w"])


def test_an_empty_directory_gives_the_state_itself(tmp_path):
    state = {"w": np.ones(2)}
    with jdp.Checkpointer(tmp_path / "new" / "one") as checkpointer:
        got, data = checkpointer.restore(state)
        assert got is state and data is None and checkpointer.latest_step is None


def test_what_was_free_to_live_anywhere_is_free_again(tmp_path, devices):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, [jnp.arange(3), KEY, jax.device_put(1.5, devices[2])])
        got, _ = checkpointer.restore([jnp.zeros(3, jnp.int32), jax.random.key(0), jax.device_put(0.0, devices[2])])
    assert [x.committed for x in got] == [False, False, True] and got[2].devices() == {devices[2]}
    assert jax.random.key_data(got[1]).tolist() == jax.random.key_data(KEY).tolist()


@pytest.mark.parametrize("spell", [str, pathlib.Path, "relative", "home"])
def test_the_directory_may_be_spelt_in_any_way(tmp_path, monkeypatch, spell):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = {"relative": "a", "home": "~/a"}.get(spell) or spell(tmp_path / "a")
    with jdp.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, np.ones(2))
        assert os.fspath(checkpointer.directory) == str(tmp_path / "a")
    assert (tmp_path / "a" / "1").is_dir()


def test_it_saves_at_multiples_and_keeps_the_newest(tmp_path):
    with jdp.Checkpointer(tmp_path, keep=2, every=5) as checkpointer:
        saved = [step for step in range(1, 24) if checkpointer.save(step, np.full(2, step))]
        assert saved == [5, 10, 15, 20] and not checkpointer.save(20, np.zeros(2))
        checkpointer.wait()
        assert sorted(os.listdir(tmp_path)) == [".jdp-lock", "15", "20"] and checkpointer.latest_step == 20
        assert checkpointer.restore(np.zeros(2, int), step=15)[0].tolist() == [15, 15]
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(np.zeros(2, int))[0].tolist() == [20, 20]


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 8])
def test_the_state_may_be_donated_right_after_save(tmp_path, spread, n):
    step = jax.jit(lambda x: jax.tree.map(lambda a: a * -1 + 7, x), donate_argnums=0)
    whole, cut = spread(n)
    host = np.arange(10**6, dtype=np.float32)
    for i in range(3):
        state = {"a": jax.device_put(host, whole), "b": jax.device_put(host, cut), "c": host.copy()}
        with jdp.Checkpointer(tmp_path / str(i)) as checkpointer:
            checkpointer.save(1, state)
            state["c"][:] = -1
            jax.block_until_ready(step({"a": state["a"], "b": state["b"]}))
            jax.block_until_ready([jax.device_put(np.full_like(host, -3), whole) for _ in range(3)])
        with jdp.Checkpointer(tmp_path / str(i)) as checkpointer:
            got, _ = checkpointer.restore({"a": host, "b": host, "c": host})
        for x in got.values():
            np.testing.assert_array_equal(x, host)


def train(devices, zero):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"]["w"] + v["params"]["b"], devices=devices)
    loss = lambda v, batch, key: jnp.mean((dp(v, batch[0]) - batch[1]) ** 2)  # noqa: E731
    step = dp.train_step(loss, optax.adam(0.1), shard_optimizer=zero)
    params = {"w": np.full((16, 8), 0.5, np.float32), "b": np.zeros(8, np.float32)}
    return step, step.init({"params": params}, key=jax.random.key(1))


@pytest.mark.full
@pytest.mark.one_case
@pytest.mark.parametrize("zero_after", [True, False])
def test_zero_from_8_devices_to_4(tmp_path, devices, zero_after):
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    step, state = train(devices, zero=True)
    state, _ = step(state, batch)
    want = on_host(state)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        step(state, batch)
    step, like = train(devices[:4], zero=zero_after)
    shardings = jax.tree.map(lambda x: x.sharding, like)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        state, _ = checkpointer.restore(like)
    assert isinstance(state, jdp.TrainState)
    assert_equal(on_host(state), want)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    state, metrics = step(state, batch)
    assert int(state.step) == 2 and np.isfinite(metrics["loss"])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(self.linear(x)))


def nnx_pair(seed):
    model = Model(nnx.Rngs(seed))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), "n": np.ones(1)}


@pytest.mark.full
def test_nnx_objects_are_updated_in_place(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    pair = nnx_pair(0)
    grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(pair["model"])
    pair["optimizer"].update(pair["model"], grads)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, pair)
        checkpointer.save(2, pair["model"])
    want = pair["model"](x)  # after the save: it takes the next of the Rngs' numbers
    for step, passed in ((1, nnx_pair(1)), (2, nnx_pair(1)["model"])):
        with jdp.Checkpointer(tmp_path) as checkpointer:
            got, _ = checkpointer.restore(passed, step=step)
        if step == 1:
            assert got["model"] is passed["model"] and got["optimizer"] is passed["optimizer"]
            state = nnx.state(got["optimizer"])
            assert_equal(on_host(nnx.to_pure_dict(state)), on_host(nnx.to_pure_dict(nnx.state(pair["optimizer"]))))
            model = got["model"]
        else:
            assert got is passed
            model = got
        np.testing.assert_array_equal(model(x), want)


def test_the_state_of_nnx_objects_is_that_of_the_objects(tmp_path):
    """Saved as `nnx.state` has it, it comes back as such a state, or into the objects."""
    pair, other = nnx_pair(0), nnx_pair(1)
    states = {"model": nnx.state(pair["model"]), "optimizer": nnx.state(pair["optimizer"]), "n": np.ones(1)}
    passed = {"model": nnx.state(other["model"]), "optimizer": nnx.state(other["optimizer"]), "n": np.zeros(1)}
    before = on_host(nnx.to_pure_dict(passed["model"]))
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, states)
        got, _ = checkpointer.restore(passed)
        assert_equal(on_host(got), on_host(states))
        assert_equal(on_host(nnx.to_pure_dict(passed["model"])), before)  # no object is in it that could be updated
        into, _ = checkpointer.restore(other)
    assert into["model"] is other["model"]
    assert_equal(on_host(nnx.state(other["model"])), on_host(states["model"]))


def test_nothing_is_printed_logged_or_warned(tmp_path, capfd, spread):
    state = state_of(1, *spread(8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with jdp.Checkpointer(tmp_path, keep=1) as checkpointer:
            for step in range(3):
                checkpointer.save(step, state)
            checkpointer.restore(state)
        with jdp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(state)
    assert capfd.readouterr() == ("", "") and not caught


# Damage.


def damaged(tmp_path, harm, steps=(1, 2)):
    """A directory whose newest checkpoint has come to harm; float leaves that zstd cannot compress away."""
    rng = np.random.default_rng(0)
    state = {"a": rng.normal(size=500).astype(np.float32), "b": rng.normal(size=400).astype(np.float32)}
    with jdp.Checkpointer(tmp_path) as checkpointer:
        for step in steps:
            checkpointer.save(step, {k: v + step for k, v in state.items()}, data=step)
    harm(tmp_path / str(steps[-1]))
    return state


def files(path, under="state"):
    return sorted((p for p in (path / under).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(place):
    def harm(path):
        largest = files(path)[-1]
        raw = bytearray(largest.read_bytes())
        raw[int(place * (len(raw) - 1))] ^= 4
        largest.write_bytes(raw)

    return harm


def truncate(path):
    largest = files(path)[-1]
    os.truncate(largest, largest.stat().st_size // 2)


def empty(name):
    return lambda path: [p.write_bytes(b"") for p in path.rglob(name)]


def wrong_cursor(path):
    """One digit of the data cursor, which is still JSON."""
    file = path / "jdp" / "metadata"
    text = file.read_text()
    assert text.count('"data": 2') == 1
    file.write_text(text.replace('"data": 2', '"data": 3'))


HARM = {
    "flipped bit": flip(0.3),
    "another": flip(0.7),
    "truncated": truncate,
    "missing file": lambda path: files(path)[-1].unlink(),
    "no arrays": lambda path: shutil.rmtree(path / "state"),
    "emptied metadata": empty("_METADATA"),
    "emptied ocdbt manifest": empty("manifest.ocdbt"),
    "missing manifest": lambda path: shutil.rmtree(path / "jdp"),
    "emptied manifest": lambda path: (path / "jdp" / "metadata").write_text(""),
    "other manifest": lambda path: (path / "jdp" / "metadata").write_text('{"content": {}}'),
    "wrong cursor": wrong_cursor,
    "empty directory": lambda path: [shutil.rmtree(p) for p in (path / "state", path / "jdp")],
}


@pytest.mark.one_case("wrong cursor", "flipped bit")
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_the_newest_intact_one_is_restored_and_the_warning_names_the_other(tmp_path, harm):
    state = damaged(tmp_path, harm)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match=r"step 2 is damaged \(.*\); step 1 is restored") as caught:
            got, data = checkpointer.restore({k: np.zeros_like(v) for k, v in state.items()})
        assert len(caught) == 1 and checkpointer.latest_step == 1
        text = str(caught[0].message)
        assert any(name in text for name in ("['a']", "['b']", "jdp/metadata"))
        assert data == 1
        for k, v in state.items():
            np.testing.assert_array_equal(got[k], v + 1)
        with pytest.raises(RuntimeError, match=r"step 2 is damaged \("):
            checkpointer.restore(state, step=2)


@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA"])
def test_a_missing_file_that_says_nothing_about_values_does_no_harm(tmp_path, name):
    missing = []
    state = damaged(tmp_path, lambda path: missing.extend(p.unlink() for p in path.rglob(name)))
    with jdp.Checkpointer(tmp_path) as checkpointer:
        got, data = checkpointer.restore(state)
    assert missing and data == 2
    for k, v in state.items():
        np.testing.assert_array_equal(got[k], v + 2)


@pytest.mark.full
def test_saving_goes_on_after_damage_and_deletes_nothing_of_it(tmp_path, capsys):
    state = damaged(tmp_path, truncate, steps=(1, 2, 4))
    damage = {p.relative_to(tmp_path / "4"): p.read_bytes() for p in files(tmp_path / "4", ".")}
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match="step 4 is damaged"):
            checkpointer.restore(state)
        assert (tmp_path / "4").is_dir()  # one who only reads changes nothing
        assert checkpointer.save(3, state, data=33) and checkpointer.save(4, state, data=44)
    assert capsys.readouterr().out == f"jdp: step 4 in {tmp_path} is damaged; it is now called 4.set-aside\n"
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "4", "4.set-aside"]
    assert {
        p.relative_to(tmp_path / "4.set-aside"): p.read_bytes() for p in files(tmp_path / "4.set-aside", ".")
    } == damage
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state)[1] == 44


@pytest.mark.full
def test_going_back_on_purpose_sets_the_abandoned_future_aside(tmp_path, capsys):
    state = damaged(tmp_path, lambda path: None, steps=(1, 2, 3))
    for expected in ("3.set-aside", "3.set-aside-2"):
        with jdp.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state, step=2)[1] == 2
            checkpointer.save(3, state, data="again")
        assert f"step 3 in {tmp_path} is newer than step 2, where" in capsys.readouterr().out
        assert (tmp_path / expected).is_dir()
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state)[1] == "again"


@pytest.mark.full
def test_all_of_the_abandoned_future_is_set_aside(tmp_path):
    """Also what comes before the step that is saved next: it is of another run."""
    state = damaged(tmp_path, lambda path: None, steps=(10, 20, 25))
    with jdp.Checkpointer(tmp_path, every=10) as checkpointer:
        checkpointer.restore(state, step=20)
        checkpointer.save(30, state, data="again")
    assert sorted(os.listdir(tmp_path)) == ["10", "20", "25.set-aside", "30"]


def test_damage_that_was_found_stays_known(tmp_path):
    state = damaged(tmp_path, truncate, steps=(1, 2, 3))
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(RuntimeError, match="step 3 is damaged"):
            checkpointer.restore(state, step=3)
        assert checkpointer.latest_step == 2
        checkpointer.restore(state, step=1)
        assert checkpointer.latest_step == 2


def test_a_run_that_could_not_restore_may_still_save_behind_what_is_there(tmp_path):
    state = damaged(tmp_path, truncate, steps=(1, 2, 3))
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(RuntimeError, match="step 3 is damaged"):
            checkpointer.restore(state, step=3)
        assert checkpointer.save(4, state)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3.set-aside", "4"]


@pytest.mark.full
def test_any_step_can_be_restored_however_many_there_are(tmp_path):
    with jdp.Checkpointer(tmp_path, keep=60) as checkpointer:
        for step in range(1, 45):
            checkpointer.save(step, np.full(1, step))
        assert checkpointer.restore(np.zeros(1, int), step=2)[0].tolist() == [2]


def test_all_damaged_is_an_error_that_lists_them(tmp_path, refused):
    state = damaged(tmp_path, truncate)
    flip(0.5)(tmp_path / "1")
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with refused(
            RuntimeError, "Checkpointer", match=r"step 2 is damaged \(.*\), and step 1 is damaged \(\['[ab]'\]"
        ):
            checkpointer.restore(state)


def test_a_save_that_fails_is_one_error_and_no_noise(tmp_path, refused, capfd, caplog):
    with jdp.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, np.ones(2))
        checkpointer.wait()
        shutil.move(tmp_path / "run", tmp_path / "away")
        (tmp_path / "run").write_text("no directory any more")
        with refused(RuntimeError, "Checkpointer", match="step 2 was not saved in .*Not a directory"):
            checkpointer.save(2, np.ones(2))
            checkpointer.wait()
        (tmp_path / "run").unlink()
        shutil.move(tmp_path / "away", tmp_path / "run")
        assert checkpointer.save(2, np.full(2, 2.0))
        checkpointer.wait()
        truncate(tmp_path / "run" / "2")
    with jdp.Checkpointer(tmp_path / "run") as checkpointer, pytest.warns(UserWarning, match="step 2 is damaged"):
        assert checkpointer.restore(np.ones(2))[0].tolist() == [1, 1]
    assert capfd.readouterr() == ("", "") and not caplog.records


# What is refused.


def test_a_state_of_another_model_is_refused_and_named(tmp_path, refused):
    state = damaged(tmp_path, lambda path: None)
    a, b = state.values()
    others = {
        r"\['a'\] is float32\[500\] in it, float16\[500\] in the state": {"a": a.astype(np.float16), "b": b},
        r"\['b'\] is float32\[400\] in it, float32\[20, 20\] in the state": {"a": a, "b": b.reshape(20, 20)},
        r"\['c'\] is not in it": {"a": a, "b": b, "c": b},
        r"it has \['b'\], which is not in the state": {"a": a},
    }
    with jdp.Checkpointer(tmp_path) as checkpointer:
        for match, other in others.items():
            with refused(ValueError, "Checkpointer", match=match):
                checkpointer.restore(other)
        with refused(ValueError, "Checkpointer", match=r"has no step 7; it has \[1, 2\]"):
            checkpointer.restore(state, step=7)


def test_a_newer_form_of_checkpoint_is_no_damage(tmp_path, refused):
    import hashlib

    state = damaged(tmp_path, lambda path: None)
    file = tmp_path / "2" / "jdp" / "metadata"
    content = json.loads(file.read_text())["content"]
    content |= {"format": 99, "versions": {**content["versions"], "jdp": "9.9"}}
    sha = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"content": content, "sha256": sha}))
    with jdp.Checkpointer(tmp_path) as checkpointer, refused(ValueError, "Checkpointer", match="written by jdp 9.9"):
        checkpointer.restore(state)


def test_a_run_that_did_not_look_does_not_save_over_another(tmp_path, refused):
    state = damaged(tmp_path, lambda path: None)
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with refused(ValueError, "Checkpointer", match="step 1 cannot be saved .* holds step 2 already"):
            checkpointer.save(1, state)
        checkpointer.restore(state)
        checkpointer.save(3, state)
        with refused(ValueError, "Checkpointer", match="step 2 comes after step 3"):
            checkpointer.save(2, state)


@pytest.mark.parametrize("data", [{1: 2}, (1, 2), {"a": np.int64(3)}, {"a": {1, 2}}, float("nan"), b"x"], ids=repr)
def test_data_that_is_no_json_is_refused(tmp_path, refused, data):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with refused(TypeError, "Checkpointer", match="data cannot be kept as JSON"):
            checkpointer.save(1, np.ones(2), data)
        assert checkpointer.save(1, np.ones(2), {"a": [1, None, "b", True, 1.5]})


def test_leaves_that_are_no_arrays_are_refused(tmp_path, refused):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        with refused(TypeError, "Checkpointer", match=r"\['name'\] is a str"):
            checkpointer.save(1, {"name": "x"})
        with refused(TypeError, "Checkpointer", match=r"\['x'\] is a numpy\.ma\.MaskedArray; .*np\.ma\.getmaskarray"):
            checkpointer.save(1, {"x": np.ma.array([1, 2], mask=[False, True])})
        with refused(ValueError, "Checkpointer", match="the state has no leaves"):
            checkpointer.save(1, {})


def rate_of(state):
    return state.opt_state.hyperparams["learning_rate"]


@pytest.mark.parametrize("options", [{}, pytest.param({"shard_optimizer": True}, marks=pytest.mark.full)], ids=str)
def test_a_rate_that_was_set_as_a_python_number_comes_back_as_the_array_of_a_new_state(tmp_path, devices, options):
    dp = jdp.DataParallel(lambda v, x: x @ v["params"], devices[:2])
    step = dp.train_step(lambda v, x: (dp.apply(v, x) ** 2).mean(), optax.inject_hyperparams(optax.sgd)(0.5), **options)
    start, x = {"params": np.ones((4, 2), np.float32)}, np.ones((4, 4), np.float32)
    state, _ = step(step.init(start), x)
    state.opt_state.hyperparams["learning_rate"] = 0.1
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        again, _ = checkpointer.restore(step.init(start))
        assert rate_of(checkpointer.restore(state)[0]) == 0.1  # and as the number that it was
    assert rate_of(again).dtype == jnp.float32 and rate_of(again) == np.float32(0.1)
    np.testing.assert_array_equal(step(again, x)[0].params, step(state, x)[0].params)


@pytest.mark.parametrize(
    "number, like", [(0.5, np.int32(1)), (0.5, np.ones(1, np.float32)), (1j, np.float32(1)), (0.5, jax.random.key(0))]
)
def test_a_number_that_would_not_become_the_array_is_of_another_state(tmp_path, refused, number, like):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"rate": number, "w": np.ones(2)})
        with refused(ValueError, "Checkpointer", match=r"\['rate'\] is (float|complex)"):
            checkpointer.restore({"rate": like, "w": np.ones(2)})


@pytest.mark.parametrize(
    "number, like", [(2**40, np.int32(0)), (-1, np.uint32(0)), (1e300, np.float32(0)), (2**63, np.int64(0))]
)
def test_a_number_that_the_array_cannot_keep_is_of_another_state(tmp_path, refused, number, like):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": number})
        match = rf"\['n'\] is {re.escape(str(number))} in it, too large or too small for {like.dtype} in the state"
        for where in (np.asarray, jax.device_put) if like.itemsize == 4 else (np.asarray,):
            with refused(ValueError, "Checkpointer", match=match):
                checkpointer.restore({"n": where(like)})


def test_an_int_of_64_bits_comes_back(tmp_path):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"seed": 2**64 - 1})
        assert checkpointer.restore({"seed": 0})[0] == {"seed": 2**64 - 1}


class Key(int):
    """Keys that differ, with one text."""

    __repr__ = lambda self: "key"  # noqa: E731


def test_two_leaves_of_one_name_are_refused(tmp_path, refused):
    with jdp.Checkpointer(tmp_path) as checkpointer:
        for door in (lambda state: checkpointer.save(1, state), checkpointer.restore):
            with refused(ValueError, "Checkpointer", match=r"two leaves of the state are called \[key\]; .* differs"):
                door({Key(1): np.ones(2), Key(2): np.zeros(2)})


def test_numbers_may_be_integers_of_numpy(tmp_path):
    with jdp.Checkpointer(tmp_path, keep=np.int64(1), every=np.int32(2)) as checkpointer:
        assert [checkpointer.save(np.int64(n), {"w": np.ones(2)}) for n in (1, 2, 3, 4)] == [False, True, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


@pytest.mark.parametrize("kwargs", [{"keep": 0}, {"every": 0}, {"keep": True}, {"every": 1.5}], ids=str)
def test_numbers_below_one_are_refused(tmp_path, refused, kwargs):
    with refused(ValueError, "Checkpointer", match=f"{next(iter(kwargs))} is"):
        jdp.Checkpointer(tmp_path, **kwargs)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path, refused):
    # A path under a file: the tests may run as root, whom permissions do not stop.
    (tmp_path / "file").write_text("")
    with refused(OSError, "Checkpointer", match="file/a cannot be written"):
        jdp.Checkpointer(tmp_path / "file" / "a")


# Signals.


def test_sigterm_saves_the_step_and_ends(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as info, jdp.Checkpointer(tmp_path, every=100) as checkpointer:
        for step in range(1, 50):
            if step == 13:
                signal.raise_signal(signal.SIGTERM)
            checkpointer.save(step, np.full(2, step), data=step)
    assert info.value.code == 0
    assert capsys.readouterr().out == f"jdp: SIGTERM: saved step 13 in {tmp_path}; ending\n"
    assert signal.getsignal(signal.SIGTERM) is before
    with jdp.Checkpointer(tmp_path) as checkpointer:
        state, data = checkpointer.restore(np.zeros(2, int))
        assert state.tolist() == [13, 13] and data == 13


def test_handlers_of_others_are_called_and_come_back(tmp_path):
    calls = []
    ours = lambda number, frame: calls.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, ours)
    try:
        with pytest.raises(SystemExit), jdp.Checkpointer(tmp_path) as checkpointer:
            signal.raise_signal(signal.SIGTERM)
            checkpointer.save(1, np.ones(2))
        assert calls == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is ours
        checkpointer = jdp.Checkpointer(tmp_path)
        assert signal.getsignal(signal.SIGTERM) is not ours
        del checkpointer  # dropped, not closed
        assert signal.getsignal(signal.SIGTERM) is ours
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with jdp.Checkpointer(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_exception_in_the_loop_waits_for_the_save(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyError):
        with jdp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, np.ones(10**6))
            raise KeyError("mine")
    assert os.listdir(tmp_path) == ["1"]


def test_what_a_killed_save_left_is_cleaned_up(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with jdp.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step is None
        checkpointer.save(8, np.ones(2))
    assert sorted(os.listdir(tmp_path)) == ["8", "notes.txt"]


def late_writes(monkeypatch, number):
    """So many directories get a file in the moment before they are removed, as from a write that nobody waits for."""
    rmdir, left = os.rmdir, list(range(number))

    def after_a_write(path, *, dir_fd=None):
        if left:
            os.close(os.open(f"{path}/late{left.pop()}", os.O_CREAT, dir_fd=dir_fd))
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", after_a_write)


def test_what_a_failed_save_goes_on_writing_is_cleaned_up(tmp_path, monkeypatch):
    (tmp_path / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    late_writes(monkeypatch, 4)
    remove_unfinished(absolute(tmp_path))
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_cleaned_up_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    late_writes(monkeypatch, 10**6)
    with pytest.raises(OSError, match=r"jdp.Checkpointer: .*7.orbax.* cannot be deleted: .*not empty; .* Delete it"):
        remove_unfinished(absolute(tmp_path), patience=0.1)


def test_one_that_cannot_be_opened_leaves_the_log_as_it_was(tmp_path):
    (tmp_path / "file").write_text("mine")
    absl = logging.getLogger("absl")
    filters, hook = list(absl.filters), sys.unraisablehook
    with pytest.raises(OSError, match="jdp.Checkpointer: .*file cannot be written"):
        jdp.Checkpointer(tmp_path / "file")
    assert absl.filters == filters and sys.unraisablehook is hook


# ---- the number of replicas


def run_of(*how):
    """Makes one step more of a run; the number of the step. As in a process of its own: no wrapper stays alive."""
    number = one_more(*how)
    gc.collect()
    return number


def one_more(folder, kind, devices, replicas):
    dp_of = {"linen": lambda f: f, "nnx": lambda f: nnx.Linear(3, 2, rngs=nnx.Rngs(0))}[kind]
    dp = jdp.DataParallel(dp_of(lambda v, x: x @ v["params"]), devices, replicas=replicas)
    tx, x = optax.adam(0.1), np.ones((5, 3), np.float32)
    with jdp.Checkpointer(folder) as checkpointer:
        if kind == "nnx":
            step = dp.train_step(lambda model, x: jnp.mean(model(x) ** 2), tx)
            held = {"model": dp.module, "optimizer": step.optimizer}
            checkpointer.restore(held)
        else:
            step = dp.train_step(lambda v, x: jnp.mean(dp(v, x) ** 2), tx)
            held, _ = checkpointer.restore(step.init({"params": np.zeros((3, 2), np.float32)}))
        if kind == "nnx":
            step(x)
            number = int(step.optimizer.step[...])
        else:
            held, _ = step(held, x)
            number = int(held.step)
        checkpointer.save(number, held)
        return number


@pytest.mark.full
@pytest.mark.budget(4)  # five runs, each with a checkpoint
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_another_number_of_replicas_is_warned_of(tmp_path, devices, kind):
    assert run_of(tmp_path, kind, devices[:2], 4) == 1
    assert run_of(tmp_path, kind, devices[:1], 4) == 2  # the same number, on other devices
    with pytest.warns(UserWarning, match=r"step 2 in .* was saved with 4 replicas, and here are 2; .*=4 to jdp") as w:
        assert run_of(tmp_path, kind, devices[:2], None) == 3
    assert len(w) == 1 and w[0].filename == __file__
    assert run_of(tmp_path, kind, devices[:4], None) == 4  # nobody has chosen one
    with pytest.warns(UserWarning, match=r"step 4 in .* was saved with 4 replicas, and here are 8; "):
        assert run_of(tmp_path, kind, devices[:4], 8) == 5


@pytest.mark.full
def test_a_checkpoint_of_before_replicas_were_recorded(tmp_path, devices):
    run_of(tmp_path, "linen", devices[:2], 4)
    change_manifest(tmp_path / "1", lambda content: content.pop("replicas"))
    assert run_of(tmp_path, "linen", devices[:2], 8) == 2
    change_manifest(tmp_path / "2", lambda content: content.update(replicas=8))
    with pytest.warns(UserWarning, match=r"step 2 is damaged \(.*its 'replicas' is 8\); step 1 is restored"):
        run_of(tmp_path, "linen", devices[:2], 8)


def change_manifest(path, change):
    """Changes what a checkpoint says that it is, with the digest that belongs to it."""
    file = path / "jdp" / "metadata"
    content = json.loads(file.read_text())["content"]
    change(content)
    file.write_text(json.dumps({"content": content, "sha256": digest(content)}))
