"""Fields of a multipart body, by Starlette's parser: text as it is, files by their size.

The body itself goes to the engine as it came. The front reads the model and the extension fields in
it, and bounds the others.
"""

from collections.abc import AsyncGenerator

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

# Above what OpenAI's routes define (images/edits: 16 images and about a dozen fields).
MAX_FILES, MAX_FIELDS = 32, 100
MAX_FIELD_BYTES = 1 << 20  # of text: a prompt

MAX_HELD_BYTES = (
    64 << 20
)  # of a file, before Starlette writes it to disk: the body is in RAM anyway


class BadForm(ValueError):
    """A body that is no multipart form, or has too many parts."""


async def read_fields(raw: bytes, content_type: str) -> dict[str, str | int]:
    """Text, or the bytes of a file. Of a repeated field the last one counts. Raises BadForm."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield raw

    parser = MultiPartParser(
        Headers({"content-type": content_type}),
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
    except ValueError as error:  # of a charset that no codec can have
        raise BadForm(f"the body is not multipart/form-data: {error}") from error
    try:
        return {
            name: value if isinstance(value, str) else value.size or 0
            for name, value in form.multi_items()
        }
    finally:
        await form.close()
