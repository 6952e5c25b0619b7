"""Speech for tests: sentences, forms that carry sound, containers, word error rates."""

import io
import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

import av
import jiwer
import numpy as np

from tests.support.engine_host import Child, Connection

# Read aloud in 33 s by the default voice.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please send the report to the office before Friday afternoon.",
    "The weather in London is cold and rainy today.",
    "She bought seven apples and a loaf of bread at the market.",
    "How much memory does the graphics card have?",
    "The train leaves the station at nine o'clock in the morning.",
    "Open the window and let some fresh air into the room.",
    "My brother works as a doctor in a small hospital.",
    "We walked along the river and watched the sun go down.",
    "Can you tell me the way to the nearest post office?",
    "The children are playing football in the garden.",
    "He wrote a long letter to his mother last Sunday.",
)
# Containers of OpenAI's list that no answer of ours is in: FFmpeg's name, codec, rate.
CONTAINERS = {
    "mp4": ("mp4", "aac", 44_100),
    "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "pcm_s16le", 16_000),
    "mpegts": ("mpegts", "aac", 48_000),
}


@dataclass(frozen=True)
class Answer:
    """A response of an engine."""

    status: int
    kind: str
    body: bytes
    is_chunked: bool

    def json(self) -> Any:
        return json.loads(self.body)


def form(raw: bytes, **fields: str | list[str]) -> tuple[bytes, str]:
    """A multipart body with a file, and its content type."""
    boundary = uuid.uuid4().hex
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="'.encode()
    parts = [head + b'file"; filename="speech"\r\n\r\n' + raw + b"\r\n"]
    for name, value in fields.items():
        for one in [value] if isinstance(value, str) else value:
            parts.append(head + f'{name}"\r\n\r\n{one}\r\n'.encode())
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), (
        f"multipart/form-data; boundary={boundary}"
    )


def post(child: Child, path: str, body: bytes, content_type: str) -> Answer:
    connection = Connection(child.path)
    connection.request("POST", path, body, {"content-type": content_type})
    answer = connection.getresponse()
    kind = answer.getheader("content-type", "")
    is_chunked = answer.getheader("content-length") is None
    read = answer.read()
    connection.close()
    return Answer(answer.status, kind, read, is_chunked)


def transcribe(child: Child, raw: bytes, **fields: str | list[str]) -> Answer:
    return post(child, "/v1/audio/transcriptions", *form(raw, **fields))


def speak(child: Child, text: str, **fields: Any) -> Answer:
    body = json.dumps({"input": text, "response_format": "wav", **fields}).encode()
    return post(child, "/v1/audio/speech", body, "application/json")


def samples_of(raw: bytes) -> tuple[np.ndarray, int]:
    """All samples of a file, and their rate: decoded with none of our code."""
    parts, rate = [], 0
    with av.open(io.BytesIO(raw)) as container:
        for frame in container.decode(audio=0):
            rate = frame.sample_rate
            floats = frame.to_ndarray().astype(np.float32)
            scale = 32_768.0 if frame.format.name.startswith("s16") else 1.0
            parts.append(floats.reshape(-1) / scale)
    return np.concatenate(parts), rate


def seconds_of(raw: bytes) -> float:
    samples, rate = samples_of(raw)
    return len(samples) / rate


def wav(samples: np.ndarray, rate: int) -> bytes:
    """float32 in [-1, 1] as a file."""
    return contained(samples, rate, "wav", "pcm_s16le", rate)


def contained(samples: np.ndarray, rate: int, form_: str, codec: str, at_hz: int) -> bytes:
    """float32 in [-1, 1] in any container."""
    sink = io.BytesIO()
    with av.open(sink, "w", format=form_) as container:
        stream: Any = container.add_stream(codec, rate=at_hz, layout="mono")
        pcm = (np.clip(samples, -1, 1) * 32_767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate = rate
        for given in (frame, None):
            for packet in stream.encode(given):
                container.mux(packet)
    return sink.getvalue()


def plain(text: str) -> str:
    """Words only. Whisper writes the time of day in figures."""
    return re.sub(r"[^a-z ]", "", text.lower().replace("9 o'clock", "nine o'clock"))


def wer(said: list[str], heard: list[str]) -> float:
    """Word error rate over all of them."""
    rate: float = jiwer.wer([plain(s) for s in said], [plain(h) for h in heard])
    return rate
