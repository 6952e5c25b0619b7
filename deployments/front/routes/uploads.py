"""Uploads of files, each spooled in a folder of our own."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from fastapi import Request
from starlette.datastructures import FormData, Headers
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser


async def read_form(request: Request, folder: Path, most_fields: int) -> FormData:
    """The form of a request with one file at most; what is large of it lies in the folder, without
    a name, until it is closed. Raises HTTPException where it is no form, and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        async with aclosing(request.stream()) as stream:
            return await _Parser(request.headers, stream, folder, most_fields).parse()
    except MultiPartException as error:
        raise HTTPException(400, error.message) from error
    except ValueError as error:  # a charset that no codec can have, or that cannot decode it
        raise HTTPException(400, f"the body is not multipart/form-data: {error}") from error


class _Parser(MultiPartParser):
    """Starlette's, which spools where temporary files are kept: there Ray keeps its session too,
    and they may be in RAM."""

    def __init__(
        self, headers: Headers, stream: AsyncGenerator[bytes, None], folder: Path, most_fields: int
    ) -> None:
        super().__init__(headers, stream, max_files=1, max_fields=most_fields)
        self._folder = folder

    def on_headers_finished(self) -> None:
        """Called by the parser where a part begins."""
        super().on_headers_finished()
        if (part := self._current_part.file) is not None:
            part.file.close()
            spool = SpooledTemporaryFile(max_size=self.spool_max_size, dir=str(self._folder))
            self._files_to_close_on_error.append(spool)
            part.file = cast(BinaryIO, spool)
