"""benchmarks/peers.py: what it counts and how it judges, without the race itself."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
ONE_LINE = "a wrong contender"


@pytest.fixture(scope="module")
def peers():
    """The package benchmarks/peers, which the programs have a relative import of."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from peers import _agree, _ask, _lines, _report, _tasks, _worker
    finally:
        sys.path.remove(str(BENCHMARKS))
    return {module.__name__.rpartition("_")[2]: module for module in (_agree, _ask, _lines, _report, _tasks, _worker)}


@pytest.fixture(scope="module")
def task(peers):
    return peers["tasks"].make("MLP", 16)


def test_every_program_is_counted_and_has_a_row(peers):
    assert {*peers["lines"].programs()} == {*peers["report"].LABELS}
    for peer in peers["lines"].programs():
        parallel, whole = peers["lines"].of(peer)
        assert (0 if peer == "torch_threads" else 1) <= parallel < whole, peer


def test_no_program_hides_a_line_of_its_parallel_part(peers):
    for peer in peers["lines"].programs():
        assert peers["lines"].unmarked((BENCHMARKS / "peers" / f"{peer}.py").read_text()) == []


def test_the_count_sees_code_alone(peers):
    text = '"""Docs,\npmap."""\n\n# pmap\nx = 1  # parallel\ny = jax.pmap(\n    f,\n)\nz = """a\n# parallel"""\n'
    assert peers["lines"].count(text) == (1, 6)
    assert peers["lines"].unmarked(text) == ["6: y = jax.pmap("]


@pytest.mark.full
@pytest.mark.parametrize("model", ["MLP", "CNN", "Transformer"])
def test_all_frameworks_start_from_the_same_parameters(peers, model):
    task = peers["tasks"].make(model, 2, batches=1)
    for framework, package in ("_torch_models", "torch"), ("_equinox_models", "equinox"):
        if importlib.util.find_spec(package):
            models = importlib.import_module(f"peers.{framework}")
            same = peers["agree"].flat(models.params_of(models.build(task)))
            for name, value in peers["agree"].flat(task.params).items():
                np.testing.assert_array_equal(same[name], value, err_msg=f"{framework} {name}")


def test_a_task_survives_its_file(peers, task, tmp_path):
    peers["tasks"].save(task, str(tmp_path / "task.npz"))
    again = peers["tasks"].load(str(tmp_path / "task.npz"))
    assert again.name == task.name and len(again.batches) == len(task.batches)
    flat = peers["agree"].flat
    for name, value in flat(task.params).items():
        np.testing.assert_array_equal(flat(again.params)[name], value)
    np.testing.assert_array_equal(again.batches[1]["x"], task.batches[1]["x"])


class OneRowTwice:
    """What DistributedSampler makes of 13 rows over two."""

    @staticmethod
    def trainer(task):
        from peers import _agree

        learnt = {}

        def train(batches):
            twice = [{key: np.concatenate([x, x[:1]]) for key, x in batch.items()} for batch in batches]
            learnt.update(_agree.after(task, twice))

        def params():
            nested = {}
            for name, value in learnt.items():
                nested.setdefault(name.split("/")[0], {})[name.split("/")[1]] = value
            return nested

        return train, params


def judged(peers, task, tmp_path, trainer):
    """The verdict as the driver makes it, of a trainer that runs here."""
    path, to = str(tmp_path / "task.npz"), str(tmp_path / "uneven.npz")
    peers["tasks"].save(task, path)
    answer = peers["worker"].uneven(trainer, path, to)
    if "refused" in answer:
        return answer["refused"]
    agree = peers["agree"]
    right = agree.after(task, [task.uneven()])
    return agree.verdict(agree.off(agree.flat(task.params), right, agree.read(pathlib.Path(to))))


def test_a_row_counted_twice_is_wrong(peers, task, tmp_path):
    verdict = judged(peers, task, tmp_path, OneRowTwice.trainer)
    assert verdict.startswith("wrong: the step is ") and 1 < float(verdict.split()[4].rstrip("%")) < 100


def test_a_contender_that_learns_nothing_is_wholly_wrong(peers, task, tmp_path):
    assert judged(peers, task, tmp_path, lambda t: (lambda batches: None, lambda: t.params)).endswith("100.0% off")
    assert peers["agree"].verdict(float("nan")).startswith("wrong")


@pytest.mark.full
def test_jdp_is_right_on_13_rows_over_8_and_shard_map_refuses(peers, task, tmp_path):
    from peers import jdp_train_step, jit_shard_map

    assert judged(peers, task, tmp_path, jdp_train_step.trainer) == "right"
    assert "13" in judged(peers, task, tmp_path, jit_shard_map.trainer)


def test_a_peer_that_is_not_installed_or_ended_says_so(peers):
    rows = {
        "jdp_train_step": {"ratio": 1.0, "noise": 0.0, "agree": 0.0, "moved": 0.0, "uneven": "right"},
        "keras_data_parallel": {"missing": "No module named 'keras'"},
        "torch_ddp": {"first": 2.0, "gone": "hung: no answer"},
    }
    ratios, *_, program = peers["report"].tables({("MLP", 2): rows})
    assert "| keras DataParallel | not installed |" in ratios and "| torch DDP, 2 processes | ended |" in ratios
    assert "not installed: No module named 'keras'" in program and "ended: hung: no answer" in program
    wrong = rows["jdp_train_step"] | {"agree": 0.1}
    assert "DIFFERENT" in peers["report"].losses([wrong])


def test_a_worker_of_a_missing_package_says_which(peers, task, tmp_path):
    peers["tasks"].save(task, str(tmp_path / "task.npz"))
    (tmp_path / "equinox.py").write_text(f"raise ImportError({ONE_LINE!r})")
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), "--worker", "equinox_filter_shard", str(tmp_path / "task.npz")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{BENCHMARKS.parent}"},
    )
    assert json.loads(run.stdout) == {"missing": ONE_LINE}


def test_the_section_replaces_itself_alone(peers, tmp_path, monkeypatch):
    path = tmp_path / "RESULTS.md"
    monkeypatch.setattr(peers["report"]._results, "RESULTS", path)
    path.write_text("# Before\n\nkept\n")
    for words in "first", "second":
        peers["report"].write([words], 1, 2)
    text = path.read_text(encoding="utf-8")
    assert "kept" in text and "second" in text and "first\n" not in text and text.count("<!-- peers -->") == 1
