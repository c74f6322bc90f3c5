"""What `jdp.Checkpointer(..., ray=True)` tells Ray Train, by a stand-in for Ray; tests/launchers/test_ray.py has it."""

import enum
import sys
import types

import numpy as np
import pytest

import jdp


class Mode(enum.Enum):
    NO_UPLOAD = 1


def stand_in(folder, kind="local"):
    """As much of ray.train as a worker's loop sees; `reported` has the paths in their order."""
    train, files = types.ModuleType("ray.train"), types.SimpleNamespace(type_name=kind)
    storage = types.SimpleNamespace(storage_filesystem=files, experiment_fs_path=str(folder))
    train.get_context = lambda: types.SimpleNamespace(get_storage=lambda: storage)
    train.Checkpoint = lambda path, files: types.SimpleNamespace(path=path)
    train.CheckpointUploadMode, train.reported = Mode, []
    train.get_checkpoint = lambda: train.reported[-1] if train.reported else None

    def report(metrics, checkpoint, checkpoint_upload_mode):
        step = int(checkpoint.path.rpartition("/")[2])
        assert metrics == {"step": step} and checkpoint_upload_mode is Mode.NO_UPLOAD
        assert (folder / "kept" / str(step) / "_CHECKPOINT_METADATA").exists(), "it is not complete"
        train.reported.append(checkpoint)

    train.report = report
    return train


@pytest.fixture
def ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray.train", train := stand_in(tmp_path))
    return train


def steps(train):
    return [int(checkpoint.path.rpartition("/")[2]) for checkpoint in train.reported]


def test_each_checkpoint_is_reported_once_when_it_is_complete(ray, tmp_path):
    with jdp.Checkpointer("kept", keep=1, every=2, ray=True) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step, {"w": np.full(2, float(step))})
            assert steps(ray) == [*range(2, step - 1, 2)]  # the last one runs still
    assert steps(ray) == [2, 4, 6, 8] and str(checkpointer.directory) == str(tmp_path / "kept")
    assert all((tmp_path / "kept" / str(step)).is_dir() for step in steps(ray))  # Ray misses what others delete
    with jdp.Checkpointer("kept", ray=True) as checkpointer:
        assert checkpointer.restore({"w": np.zeros(2)})[0]["w"].tolist() == [8, 8]
    assert steps(ray) == [2, 4, 6, 8]


def test_what_was_saved_and_not_reported_is_restored_and_reported(ray, tmp_path):
    with jdp.Checkpointer("kept", ray=True) as checkpointer:
        checkpointer.save(3, {"w": np.ones(1)})
    ray.reported.clear()
    with jdp.Checkpointer("kept", ray=True) as checkpointer:
        checkpointer.restore({"w": np.zeros(1)})
        assert steps(ray) == [3]


def test_a_loop_that_fails_does_not_wait_for_the_others_to_report(ray):
    with pytest.raises(KeyError), jdp.Checkpointer("kept", ray=True) as checkpointer:
        checkpointer.save(1, {"w": np.ones(1)})
        raise KeyError
    assert checkpointer.latest_step == 1 and not ray.reported


def test_after_a_notice_one_step_is_saved_whatever_every_is(ray, monkeypatch, capsys):
    context = types.SimpleNamespace(preemption_context=types.SimpleNamespace(preemption_info=None))
    module = types.SimpleNamespace(_train_context=context)
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal.execution.context", module)
    with jdp.Checkpointer("kept", every=100, ray=True) as checkpointer:
        for step in range(1, 6):
            context.preemption_context.preemption_info = object() if step >= 3 else None
            assert checkpointer.save(step, {"w": np.ones(1)}) is (step == 3)
            assert steps(ray) == [3] * (step >= 3)
    assert "jdp: SIGTERM: saved step 3 in " in capsys.readouterr().out


def test_where_no_worker_of_ray_is_it_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="jdp.Checkpointer: ray=True, and this is no worker of Ray Train; .* leave"):
        jdp.Checkpointer("kept", ray=True)


@pytest.mark.parametrize("name", ["/tmp/kept", "../kept", ".", "gs://bucket/kept"])
def test_a_directory_outside_of_the_run_is_refused(ray, name):
    with pytest.raises(ValueError, match=f"jdp.Checkpointer: {name!r} is no folder below that of Ray's run; .* Pass a"):
        jdp.Checkpointer(name, ray=True)


def test_a_file_system_that_cannot_be_read_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray.train", stand_in(tmp_path, "hdfs"))
    with pytest.raises(ValueError, match="Ray's run is on a file system of type 'hdfs'; .* one of local, s3, gcs"):
        jdp.Checkpointer("kept", ray=True)
