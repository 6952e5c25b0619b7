"""Multipart forms as an engine reads them: text fields, and the bytes of files, all in memory."""

from dataclasses import dataclass, field

from starlette.datastructures import Headers, UploadFile

from deployments.engines import asgi
from deployments.engines.asgi import BadField
from deployments.engines.protocol import Receive, Scope
from deployments.requests.multipart import BadForm, parsed


@dataclass(frozen=True, slots=True)
class Form:
    """A field may be there several times, as `timestamp_granularities[]` is."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        """The last of that name; `default` where there is none, or an empty one."""
        return self.texts.get(name, [default])[-1] or default

    def all(self, name: str) -> list[str]:
        """The values of a list field: `name[]`, as OpenAI's clients write it, or `name`."""
        return self.texts.get(f"{name}[]", []) + self.texts.get(name, [])

    def file(self, name: str) -> bytes:
        """Raises BadField where it is not there, or is empty."""
        files = self.files.get(name, [])
        if not files or not files[-1]:
            raise BadField(name, f"`{name}` is missing or empty; send it as a file")
        return files[-1]


async def read(scope: Scope, receive: Receive) -> Form | None:
    """The whole form, or None when the client leaves before it has sent all of it. Raises
    BadField."""
    raw = await asgi.read_body(receive)
    if raw is None:
        return None
    form = Form()
    try:
        async with parsed(raw, Headers(raw=scope["headers"])) as fields:
            for name, value in fields.multi_items():
                if isinstance(value, UploadFile):
                    form.files.setdefault(name, []).append(await value.read())
                else:
                    form.texts.setdefault(name, []).append(value)
    except BadForm as error:
        raise BadField("body", str(error)) from error
    return form
