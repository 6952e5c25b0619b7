"""Two nodes: no engine is spawned under the other's grant; a dead node leaves with its devices, and
serves again when it is back."""

import pytest

from tests.support import own_cluster


@pytest.mark.spec("A3", "A19", "M3")
def test_node_spawns_under_no_grant_of_another_and_a_dead_node_leaves_with_its_devices() -> None:
    own_cluster.run("tests.faults.node_loss")
