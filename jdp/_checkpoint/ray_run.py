"""A run of Ray Train, as its workers see it: its storage, the checkpoints reported to it, and its notice to end."""

from __future__ import annotations

import os

from .._processes.launchers import ray_has_given_notice, ray_train
from .items import VERB
from .read import tell_all

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}  # by Arrow's file system type


class RayRun:
    """The checkpoints of a run, which are reported to Ray in place: nothing is copied."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._train = ray_train()
        if self._train is None:
            raise RuntimeError(
                f"jdp.{VERB}: ray=True, and this is no worker of Ray Train; checkpoints are reported to the run of "
                f"which the process is a worker. Make it in the loop that a JaxTrainer runs, or leave ray out."
            )
        name = os.path.normpath(os.fspath(directory))
        if os.path.isabs(name) or "://" in os.fspath(directory) or name.split(os.sep)[0] in (os.pardir, os.curdir):
            raise ValueError(
                f"jdp.{VERB}: {os.fspath(directory)!r} is no folder below that of Ray's run; with ray=True the "
                f"checkpoints are there, so that Ray need not copy them. Pass a name, as 'checkpoints', and the rest "
                f"as RunConfig(storage_path=...)."
            )
        storage = self._train.get_context().get_storage()
        self._files = storage.storage_filesystem
        if self._files.type_name not in _SCHEMES:
            raise ValueError(
                f"jdp.{VERB}: Ray's run is on a file system of type {self._files.type_name!r}; with ray=True it is "
                f"one of {', '.join(_SCHEMES)}. Choose another RunConfig(storage_path=...), or leave ray out."
            )
        self._folder = f"{storage.experiment_fs_path}/{name}"
        self.directory = _SCHEMES[self._files.type_name] + self._folder
        found = self._train.get_checkpoint()
        last = os.path.relpath(found.path, self._folder) if found is not None else ""
        self._reported = int(last) if last.isdecimal() else -1
        self._noticed = False

    def report(self, step: int | None) -> None:
        """Reports a complete checkpoint, unless that was done; all workers call it, and wait for each other."""
        if step is None or step <= self._reported:
            return
        tell_all("")  # jdp names the process that does not come; Ray would wait for it forever
        checkpoint = self._train.Checkpoint(f"{self._folder}/{step}", self._files)
        where_it_is = self._train.CheckpointUploadMode.NO_UPLOAD
        self._train.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=where_it_is)
        self._reported = step

    def gives_notice(self) -> bool:
        """Returns True once, after Ray's notice that a node of this run will be taken away."""
        before, self._noticed = self._noticed, self._noticed or ray_has_given_notice()
        return self._noticed and not before
