"""Breaker in virtual time."""

import pytest

from deployments.remotes.breaker import RULES, TRIAL_S, Breaker, Failure


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fail(breaker: Breaker, failure: Failure, times: int = 1) -> None:
    for _ in range(times):
        breaker.begin()
        breaker.failed(failure)


@pytest.mark.spec("J5")
@pytest.mark.parametrize("failure", list(RULES))
def test_each_class_of_failure_has_its_own_patience(clock: Clock, failure: Failure) -> None:
    rule, breaker = RULES[failure], Breaker(clock)
    fail(breaker, failure, rule.in_a_row - 1)
    assert breaker.left_s == 0
    fail(breaker, failure)
    assert (breaker.left_s, breaker.cause) == (rule.cool_s, failure)


@pytest.mark.spec("J5")
def test_after_the_cool_down_one_request_tries_and_a_failure_doubles_it(clock: Clock) -> None:
    breaker = Breaker(clock)
    fail(breaker, Failure.SERVER, 3)
    clock.now_s += 10
    assert breaker.left_s == 0
    assert breaker.begin()
    assert breaker.left_s == TRIAL_S, "the others wait for it"
    breaker.failed(Failure.SERVER)
    assert breaker.left_s == 20, "one failure, because it was the trial"
    clock.now_s += 20
    breaker.begin()
    breaker.answered()
    assert breaker.left_s == 0
    fail(breaker, Failure.SERVER, 2)
    assert breaker.left_s == 0, "an answer makes all forgotten"


@pytest.mark.spec("J5", "L3")
@pytest.mark.parametrize("failure", sorted(set(Failure) - RULES.keys()))
def test_answers_that_the_request_may_have_caused_refuse_no_other(
    clock: Clock, failure: Failure
) -> None:
    breaker = Breaker(clock)
    fail(breaker, Failure.SERVER, 2)
    fail(breaker, failure, 9)
    assert breaker.left_s == 0
    fail(breaker, Failure.SERVER, 2)
    assert breaker.left_s == 0, "the remote has answered in between"


def test_a_trial_whose_client_left_lets_another_try(clock: Clock) -> None:
    breaker = Breaker(clock)
    fail(breaker, Failure.KEY)
    clock.now_s += 300
    breaker.begin()
    breaker.abandoned()
    assert breaker.left_s == 0


@pytest.mark.spec("J5")
def test_the_remotes_own_word_counts_within_a_bound(clock: Clock) -> None:
    breaker = Breaker(clock)
    breaker.failed(Failure.LIMITED, 40.0)
    assert breaker.left_s == 40
    breaker = Breaker(clock)
    breaker.failed(Failure.LIMITED, 1e5)
    assert breaker.left_s == RULES[Failure.LIMITED].most_s
    for _ in range(30):
        breaker.failed(Failure.LIMITED)
    assert breaker.left_s == RULES[Failure.LIMITED].most_s
