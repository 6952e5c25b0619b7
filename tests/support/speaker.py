"""A capability that takes multipart and streams binary, for tests of the front without Ray."""

from collections.abc import AsyncGenerator

from deployments import messages
from deployments.config.schema import Table, parse_table
from deployments.front.inference.service import Send

SPEAK = "/v1/hum"
FORM = {"content-type": "multipart/form-data; boundary=b"}
BODY = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nvoice\r\n--b--\r\n'
AUDIO = messages.ResponseHead(200, {"content-type": "audio/wav"}, is_chunked=True)


def table(in_flight: int = 2, *models: str) -> Table:
    made = {name: {"source": "x"} for name in models or ("voice",)}
    speak = {"role": "text", "engine": "m:f", "models": made, "paths": [SPEAK]}
    return parse_table({"front": {"in_flight": in_flight}, "capabilities": {"speak": speak}})


class Response:
    """Stands for Serve's response generator."""

    def __init__(self, *parts: messages.Part) -> None:
        self.parts, self.was_cancelled = list(parts), False

    async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
        for part in self.parts:
            yield part

    def cancel(self) -> None:
        self.was_cancelled = True


class Speaker:
    """A capability that takes multipart and streams binary."""

    def __init__(self) -> None:
        self.calls: list[messages.InferenceCall] = []
        self.asked_for: list[str] = []
        self.response = Response(AUDIO, b"RIFF", b"\x00\xff")

    def send_of(self, capability: str) -> Send:
        self.asked_for.append(capability)
        if capability != "speak":
            raise KeyError(capability)
        return self.send

    def send(self, call: messages.InferenceCall) -> Response:
        self.calls.append(call)
        return self.response
