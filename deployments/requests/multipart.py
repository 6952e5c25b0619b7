"""Multipart bodies, by Starlette's parser: read by the front, and once more by an engine.

The front reads the model and the extension fields in one and bounds the others; the body itself
goes to the engine as it came.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser

# Above what OpenAI's routes define (images/edits: 16 images and about a dozen fields).
MAX_FILES, MAX_FIELDS = 32, 100
MAX_FIELD_BYTES = 1 << 20  # of text: a prompt
# Of a file, before Starlette writes it to disk: the body is in RAM anyway.
MAX_HELD_BYTES = 64 << 20


class BadForm(ValueError):
    """A body that is no multipart form, or has too many parts."""


@asynccontextmanager
async def parsed(raw: bytes, headers: Headers) -> AsyncIterator[FormData]:
    """The form, whose files are closed behind it. Raises BadForm."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw

    parser = MultiPartParser(
        headers,
        stream(),
        max_files=MAX_FILES,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    parser.spool_max_size = MAX_HELD_BYTES
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadForm(f"the body is not multipart/form-data: {error.message}") from error
    except (KeyError, ValueError) as error:  # no boundary, or a charset that no codec can have
        raise BadForm(f"the body is not multipart/form-data: {error}") from error
    try:
        yield form
    finally:
        await form.close()


async def read_fields(raw: bytes, content_type: str) -> dict[str, str | int]:
    """Text as it is, or the bytes of a file. Of a repeated field the last one counts. Raises
    BadForm."""
    async with parsed(raw, Headers({"content-type": content_type})) as form:
        return {
            name: value if isinstance(value, str) else value.size or 0
            for name, value in form.multi_items()
        }
