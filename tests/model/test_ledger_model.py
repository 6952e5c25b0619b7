"""The core against a model too simple to be wrong, under any sequence of events."""

from hypothesis import HealthCheck, settings

from tests.model.ledger_machine import LedgerMachine
from tests.support.examples import examples

TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
