"""A pytest plugin of `make test`: which tests run one after the other on the same worker of xdist.

pytest -p tests.support.lanes -n 2

Most of these tests wait for processes, so two clusters of Ray run side by side on two cores. The
folder of the graph is one piece of work, because it shares one running system, and so is that of
the simulation, because its tests share the seeds that ran; of the other folders each file is one.
Files of the graph that start a system of their own are a piece together: no three systems start
side by side.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WHOLE_FOLDERS = ("tests/graph", "tests/sim")
OWN = "tests/graph: systems of their own"
OWN_FILES = ("test_additions.py", "test_gpu_config.py", "test_plain_serve_run.py")
# The longest piece begins first; the files of one fixture of the session stay close together.
ORDER = (
    "tests/graph", "tests/integration", "tests/faults", OWN, "tests/contracts", "tests/training",
    "tests/notebooks", "tests/engines", "tests/golden", "tests/commands", "tests/browser",
    "tests/sim", "tests/model",
)  # fmt: skip


def folder_of(nodeid: str) -> str:
    return "/".join(nodeid.split("/")[:2])


def piece_of(nodeid: str) -> str:
    """Names the folder, the files or the file whose tests stay on one worker."""
    folder, file = folder_of(nodeid), nodeid.split("::", 1)[0]
    if folder == "tests/graph" and file.endswith(OWN_FILES):
        return OWN
    return folder if folder in WHOLE_FOLDERS else file


def turn_of(nodeid: str) -> int:
    """The place of a test's piece or folder in ORDER; folders that it does not name come last."""
    named = OWN if piece_of(nodeid) == OWN else folder_of(nodeid)
    return ORDER.index(named) if named in ORDER else len(ORDER)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Hands a worker that is free the next piece."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """xdist puts back all pieces of a worker that died, those that were done too; a worker that
        is given such a piece has nothing to run, and all wait for it."""
        pieces = self.assigned_work[node]
        for name in [name for name, tests in pieces.items() if all(tests.values())]:
            del pieces[name]
        died_in: str | None = super().remove_node(node)
        return died_in


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    config.option.loadscopereorder = False  # a folder's number of tests says nothing of its time
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn_of(item.nodeid))
