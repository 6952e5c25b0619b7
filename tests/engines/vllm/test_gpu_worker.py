"""The sleep of vLLM's worker for GPUs, with vLLM's own replaced: no GPU is here."""

import inspect
from types import SimpleNamespace

import pytest
from vllm.v1.worker.gpu_worker import Worker

from deployments.engines.vllm.kv.staged_copier import StagedCopier
from deployments.engines.vllm.worker import gpu_worker
from deployments.engines.vllm.worker.gpu_worker import SleepingGpuWorker

fall_asleep = SleepingGpuWorker.sleep


@pytest.fixture
def worker() -> SleepingGpuWorker:
    return SleepingGpuWorker.__new__(SleepingGpuWorker)


@pytest.mark.spec("D6")
def test_sleep_stands_where_another_process_took_memory_of_the_card_meanwhile(
    worker: SleepingGpuWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []

    def sleep(self: Worker, level: int) -> None:
        levels.append(level)
        raise AssertionError("Memory usage increased after sleeping.")

    monkeypatch.setattr(Worker, "sleep", sleep)
    fall_asleep(worker, 1)
    assert levels == [1]


@pytest.mark.spec("D6", "G4")
def test_blocks_on_their_way_to_a_slab_arrive_before_their_memory_goes(
    worker: SleepingGpuWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []
    copier = StagedCopier.__new__(StagedCopier)
    monkeypatch.setattr(copier, "drain", lambda: acts.append("drain"))
    connector = SimpleNamespace(connector_worker=SimpleNamespace(worker=copier))
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(Worker, "sleep", lambda self, level: acts.append("sleep"))
    fall_asleep(worker, 1)
    assert acts == ["drain", "sleep"]


@pytest.mark.parametrize("error", [AssertionError("no model"), RuntimeError("CUDA error")])
def test_other_failures_of_a_sleep_are_told(
    worker: SleepingGpuWorker, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(self: Worker, level: int) -> None:
        raise error

    monkeypatch.setattr(Worker, "sleep", sleep)
    with pytest.raises(type(error), match=str(error)):
        fall_asleep(worker, 1)


def test_vllm_checks_the_cards_free_bytes_as_the_last_act_of_a_sleep() -> None:
    """So that nothing of a sleep is left undone."""
    lines = inspect.getsource(Worker.sleep).rstrip().split("assert freed_bytes >= 0, ")
    assert len(lines) == 2 and lines[1].startswith('"Memory usage increased after sleeping."')
    rest = lines[1].split("\n", 1)[1].strip()
    assert rest.startswith("logger.info(") and rest.count("(") == rest.count(")") == 3
