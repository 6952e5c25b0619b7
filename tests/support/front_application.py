"""What tests of the front's application have in its arbiter's place, and how they read errors."""

from typing import Any

from httpx import Response

STATE: dict[str, Any] = {
    "tickets": [], "queue": [], "cooldowns": [], "floors": [], "load_times": [], "table": {},
    "hours": [],
}  # fmt: skip


class Arbiter:
    """Answers each method with what the test gave it, and keeps the calls."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"state": STATE}
        self.calls: list[tuple[Any, ...]] = []

    async def __call__(self, method: str, *args: Any, within_s: float = 0) -> Any:
        self.calls.append((method, *args))
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer


def error(answer: Response) -> dict[str, Any]:
    error_object: dict[str, Any] = answer.json()["error"]
    assert error_object.keys() == {"message", "type", "param", "code"}
    return error_object
