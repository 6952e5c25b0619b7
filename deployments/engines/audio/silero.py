"""Voice activity detection by Silero's net, as a plain torch module.

`POST /v1/audio/vad`, multipart: `file`, and where wanted `threshold` (0.5), `min_speech_ms` (250),
`min_silence_ms` (100), `pad_ms` (30). The answer, in seconds:
`{"duration": 5.2, "segments": [{"start": 1.0, "end": 3.8}]}`.
`engine_args`: `max_seconds` (of one file, 7,200), `threads` (default: the model's, else 1).

The model is a folder with model.safetensors, which models/make_models.py writes from the weights of
the package's TorchScript: the .safetensors in that package is another training.
Source: github.com/snakers4/silero-vad; its TorchScript is equal to 1e-5 (tests/engines).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from silero_vad.utils_vad import get_speech_timestamps_from_probs
from torch import Tensor, nn
from torch.nn.functional import pad as padded

from deployments.engines import asgi, forms
from deployments.engines.asgi import BadField
from deployments.engines.audio import sound
from deployments.engines.audio.sound import HEARD_HZ
from deployments.engines.one_thread import OneThread
from deployments.engines.protocol import Config, Receive, Scope, Send

PATHS = ("/v1/vad", "/v1/audio/vad")
MAX_SECONDS = 7_200.0
FRAME, CONTEXT, PAD = 512, 64, 64  # samples: of a frame, of the frame before, mirrored at its end
BINS = 129  # of the spectrum: its real parts, then as many imaginary ones
WIDTH = 128
# The fields of a request by the library's names, each with its bounds and its default.
FIELDS = {
    "threshold": ("threshold", 0.01, 0.99, 0.5),
    "min_speech_ms": ("min_speech_duration_ms", 0, 60_000, 250),
    "min_silence_ms": ("min_silence_duration_ms", 0, 60_000, 100),
    "pad_ms": ("speech_pad_ms", 0, 10_000, 30),
}


class SileroVad(nn.Module):
    """Spectrum, four convolutions, an LSTM over the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Conv1d(1, 2 * BINS, 256, stride=128, bias=False)
        self.encoder = nn.ModuleList(
            [
                nn.Conv1d(BINS, 128, 3, padding=1),
                nn.Conv1d(128, 64, 3, stride=2, padding=1),
                nn.Conv1d(64, 64, 3, stride=2, padding=1),
                nn.Conv1d(64, WIDTH, 3, padding=1),
            ]
        )
        self.rnn = nn.LSTMCell(WIDTH, WIDTH)
        self.last = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, wave: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        """`wave`: CONTEXT samples and n frames of FRAME at 16 kHz. Returns the probability of
        speech for each frame, shape [n], and the state for what follows."""
        frames = wave.unfold(0, CONTEXT + FRAME, FRAME)
        spectrum = self.stft(padded(frames.unsqueeze(1), (0, PAD), "reflect"))
        x = (spectrum[:, :BINS] ** 2 + spectrum[:, BINS:] ** 2).sqrt()
        for layer in self.encoder:
            x = layer(x).relu()
        cell = self.rnn
        weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
        steps = x.squeeze(-1).unsqueeze(1)  # [n, 1, WIDTH]: all steps in one call
        hidden, h, c = torch.lstm(steps, state, weights, True, 1, 0.0, False, False, False)
        return self.last(hidden.squeeze(1).unsqueeze(-1).relu()).sigmoid().flatten(), (h, c)


def load(folder: Path) -> SileroVad:
    """Raises OSError."""
    model = SileroVad()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def probabilities(model: SileroVad, parts: Iterable[np.ndarray]) -> Iterator[list[float]]:
    """Yields part by part, for each FRAME of int16 samples at 16 kHz, the probability of speech;
    the net's memory goes from part to part. `parts`: of whole frames, but for the last."""
    state = (torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, WIDTH))
    context = torch.zeros(CONTEXT)
    for samples in parts:
        part = torch.from_numpy(sound.floats(samples))
        part = padded(part, (0, -len(part) % FRAME))
        with torch.inference_mode():
            probability, state = model(torch.cat([context, part]), state)
        context = part[-CONTEXT:]
        yield probability.tolist()


def spans(probabilities: list[float], count: int, **options: float) -> list[tuple[int, int]]:
    """Begin and end of speech, in samples. `count`: of all samples; `options`: arguments of the
    library's function."""
    rows = get_speech_timestamps_from_probs(probabilities, audio_length_samples=count, **options)
    return [(row["start"], row["end"]) for row in rows]


def build(config: Config) -> "VadEngine":
    return VadEngine(config)


class VadEngine:
    """One model and one thread; requests take turns by ten seconds of sound, and no more than that
    of a file is decoded at a time."""

    can_sleep = False  # its weights are a megabyte

    def __init__(self, config: Config) -> None:
        args = config.get("engine_args", {})
        self.path = Path(config["model"])
        self.threads: int = args.get("threads", config.get("threads", 1))
        self.max_seconds = float(args.get("max_seconds", MAX_SECONDS))
        self.worker = OneThread("vad")
        self.model: Any = None

    async def load(self) -> None:
        self.model = await self.worker.run(self._load)

    def _load(self) -> SileroVad:
        torch.set_num_threads(self.threads)
        return load(self.path)

    async def health(self) -> None:
        self.worker.check()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PATHS or scope["method"] != "POST":
            return await asgi.refuse(send, 404, f"no route {scope['method']} {scope['path']}")
        try:
            form = await forms.read(scope, receive)
            if form is None:
                return
            options = {name: _number(form, field) for field, (name, *_) in FIELDS.items()}
            work = self._answer(form.file("file"), options, send)
            await asgi.until_disconnected(work, receive)
        except BadField as error:
            await asgi.refuse_request(send, error)

    async def _answer(self, raw: bytes, options: dict[str, float], send: Send) -> None:
        file = sound.SoundFile(raw, self.max_seconds)
        parts = [p async for p in self.worker.each(probabilities(self.model, file.parts()))]
        speech = spans([p for part in parts for p in part], file.count, **options)
        rows = [{"start": b / HEARD_HZ, "end": e / HEARD_HZ} for b, e in speech]
        body = {"duration": file.count / HEARD_HZ, "segments": rows}
        await asgi.respond(send, 200, body)


def _number(form: forms.Form, field: str) -> float:
    _, least, most, default = FIELDS[field]
    text = form.text(field, str(default))
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise BadField(field, f"`{field}` {text!r} is no number from {least} to {most}")
    return number
