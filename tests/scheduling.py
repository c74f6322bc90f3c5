"""How the files of tests are shared out among the workers: as by xdist, but that a worker may crash."""

import pytest
from xdist.scheduler import LoadFileScheduling


class Files(LoadFileScheduling):
    """xdist's `--dist loadfile`, which goes on when a worker has crashed: there (3.8) the run waits forever.

    It hands the files of that worker on, also those that are done, and a worker that gets nothing to do, or one case
    alone, waits for more.
    """

    def schedule(self):
        self.config.option.loadscopereorder = False  # conftest.py has put them in an order
        super().schedule()

    def remove_node(self, node):
        files = self.assigned_work.pop(node)
        left = [case for cases in files.values() for case, is_done in cases.items() if not is_done]
        if left:
            for cases in files.values():
                cases.pop(left[0], None)  # it crashed
            self.workqueue.update({name: cases for name, cases in files.items() if not all(cases.values())})
            for other in self.assigned_work:
                self._reschedule(other)
        return left[0] if left else None

    def _reschedule(self, node):
        if node.shutting_down or node not in self.registered_collections:  # one that starts gets its own later
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 3:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()  # when it has done what it has


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None
