"""Settings pickle and compare."""

import pickle

from arbiter.core.settings import DEFAULTS, Settings


def test_settings_pickle_and_compare() -> None:
    assert pickle.loads(pickle.dumps(DEFAULTS)) == Settings()
