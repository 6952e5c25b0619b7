"""Bodies of many wrong items: a body of 32 MiB has place for 16 million."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from deployments.front.inference.schemas import SCHEMAS
from deployments.front.ollama import bodies
from deployments.front.routes.batches import BatchBody

OF_OLLAMA = (bodies.Chat, bodies.Generate, bodies.Embed, bodies.Message)
BODIES = sorted(
    {row.body for row in SCHEMAS.values() if row.body is not None} | {*OF_OLLAMA, BatchBody},
    key=lambda body: body.__name__,
)


def wrong(count: int) -> Iterator[object]:
    """Values of so many items none of which any list or map of a body takes."""
    yield [object()] * count
    yield [{"role": object()}] * count
    yield {str(number): object() for number in range(count)}


def error_count(body: type[BaseModel], field: str, value: object) -> int:
    try:
        body.model_validate({field: value})
    except ValidationError as error:
        return sum(problem["loc"][:1] == (field,) for problem in error.errors())
    return 0


@pytest.mark.spec("J2", "L3")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_many_wrong_items_of_a_field_make_no_more_errors_than_a_few(body: type[BaseModel]) -> None:
    for field in body.model_fields:
        for few, many in zip(wrong(17), wrong(500), strict=True):
            assert error_count(body, field, many) <= max(error_count(body, field, few), 1), field
