"""AsyncCalls: what a client, or a model that it holds, can be asked. Each is one request to the
front; its fields are checked here by the front's own request models, and there once more."""

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from arbiter.errors import DeadlineUnmet
from deployments.client import answers, messages
from deployments.client.connection import Connection, Files, Request, of_json
from deployments.client.fields import (
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    Fields,
    ImageFields,
    Json,
    Messages,
    RerankFields,
    SpeechFields,
    TranscriptionFields,
    VadFields,
)
from deployments.client.media import Audio, AudioLike, Picture, PictureLike, audio_of, picture_of
from deployments.front.inference.request import check_body
from deployments.front.inference.schemas import OF_THE_TABLE, SCHEMAS

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
EMBED, RERANK = "/v1/embeddings", "/v1/rerank"
DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"
TRANSCRIBE, SPEAK, VAD = "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/audio/vad"
DESCRIBE = "Describe this picture."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """The time that several calls may take together."""

    budget_s: float
    until_s: float  # on the monotonic clock

    def left_s(self, model: str) -> float:
        """Raises DeadlineUnmet once it is over."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise self.unmet(model)
        return left_s

    def unmet(self, model: str) -> DeadlineUnmet:
        return DeadlineUnmet(model, self.budget_s, 1.0)


class AsyncCalls:
    """Every call takes `model`, unless the client was made with a model for all calls, and as
    keywords the fields of its request model (deployments.client.fields).

    Raises RequestError: BadRequest, UnknownModel, QueueFull, DeadlineUnmet and the others of
    arbiter.errors; FrontUnreachable where no front answers. Raises TypeError where no model is
    named, and OSError where the file of a picture or sound cannot be read."""

    def __init__(
        self, connection: Connection, model: str | None = None, budget: Budget | None = None
    ) -> None:
        self._connection, self._default_model, self._budget = connection, model, budget

    def within(self, budget_s: float) -> Self:
        """Returns a view of this client whose calls share `budget_s` seconds from now. Each call
        has what is left as its deadline, so a call that cannot be served in time is refused at
        once, with DeadlineUnmet. Of a stream only the beginning must come by then."""
        view = copy.copy(self)
        view._budget = Budget(budget_s, time.monotonic() + budget_s)
        return view

    # -- text ------------------------------------------------------------------------------------

    async def chat(
        self, conversation: Messages, *, model: str | None = None, **fields: Unpack[ChatFields]
    ) -> answers.Answer:
        """`conversation`: a text, or messages as OpenAI has them, with Pictures among their
        parts."""
        body = {"messages": messages.written(conversation)}
        return await self._read(CHAT, model, fields, body, answers.answer)

    async def stream_chat(
        self, conversation: Messages, *, model: str | None = None, **fields: Unpack[ChatFields]
    ) -> AsyncGenerator[answers.Delta]:
        """Yields the answer of `chat` while it is written. A caller that stops early ends the
        work."""
        body = {"messages": messages.written(conversation), "stream": True}
        async for event in self._events(CHAT, model, fields, body):
            for delta in answers.deltas(event):
                yield delta

    async def complete(
        self, prompt: str, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> answers.Answer:
        """Returns the text with which the model continues `prompt`."""
        return await self._read(COMPLETE, model, fields, {"prompt": prompt}, answers.answer)

    async def stream_complete(
        self, prompt: str, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> AsyncGenerator[answers.Delta]:
        """Yields the answer of `complete` while it is written."""
        body = {"prompt": prompt, "stream": True}
        async for event in self._events(COMPLETE, model, fields, body):
            for delta in answers.deltas(event):
                yield delta

    async def embed(
        self, texts: str | list[str], *, model: str | None = None, **fields: Unpack[EmbeddingFields]
    ) -> answers.Embeddings:
        """Returns a vector of floats for each text, in their order."""
        body = {"input": texts, "encoding_format": "float"}
        return await self._read(EMBED, model, fields, body, answers.embeddings)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        **fields: Unpack[RerankFields],
    ) -> answers.Ranking:
        """Orders the documents by how well they answer the query, the best first."""
        body = {"query": query, "documents": list(documents), "return_documents": False}
        ranked = partial(answers.ranking, documents=list(documents))
        return await self._read(RERANK, model, fields, body, ranked)

    # -- pictures --------------------------------------------------------------------------------

    async def images(
        self,
        prompt: str,
        *,
        model: str | None = None,
        picture: PictureLike | None = None,
        mask: PictureLike | None = None,
        **fields: Unpack[ImageFields],
    ) -> tuple[Picture, ...]:
        """Draws pictures of what `prompt` says. With `picture` it changes that picture instead,
        and with `mask` only where the mask is transparent."""
        path, files = await _path_and_files(picture, mask)
        return await self._read(path, model, fields, {"prompt": prompt}, answers.pictures, files)

    async def stream_images(
        self,
        prompt: str,
        *,
        previews: int = 2,
        model: str | None = None,
        picture: PictureLike | None = None,
        mask: PictureLike | None = None,
        **fields: Unpack[ImageFields],
    ) -> AsyncGenerator[Picture]:
        """Yields the pictures of `images`, each after `previews` unfinished versions of it, whose
        `is_final` is False."""
        path, files = await _path_and_files(picture, mask)
        body = {"prompt": prompt, "stream": True, "partial_images": previews}
        async for event in self._events(path, model, fields, body, files):
            yield answers.drawn(event)

    async def describe(
        self,
        pictures: PictureLike | Sequence[PictureLike],
        question: str = DESCRIBE,
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> answers.Answer:
        """Returns a vision model's answer to a question about one picture, or several."""
        return await self.chat(await _picture_messages(pictures, question), model=model, **fields)

    async def stream_describe(
        self,
        pictures: PictureLike | Sequence[PictureLike],
        question: str = DESCRIBE,
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncGenerator[answers.Delta]:
        """Yields the answer of `describe` while it is written."""
        shown = await _picture_messages(pictures, question)
        async for delta in self.stream_chat(shown, model=model, **fields):
            yield delta

    # -- sound -----------------------------------------------------------------------------------

    async def transcribe(
        self,
        sound: AudioLike,
        *,
        model: str | None = None,
        with_words: bool = False,
        **fields: Unpack[TranscriptionFields],
    ) -> answers.Transcript:
        """Returns the text of recorded speech, with the seconds of each segment; `with_words`: of
        each word as well."""
        stretches = ["segment", "word"] if with_words else ["segment"]
        body = {"response_format": "verbose_json", "timestamp_granularities[]": stretches}
        files = await _sound_file(sound)
        return await self._read(TRANSCRIBE, model, fields, body, answers.transcript, files)

    async def stream_transcribe(
        self, sound: AudioLike, *, model: str | None = None, **fields: Unpack[TranscriptionFields]
    ) -> AsyncGenerator[answers.Delta]:
        """Yields the answer of `transcribe` segment by segment."""
        files = await _sound_file(sound)
        async for event in self._events(TRANSCRIBE, model, fields, {"stream": True}, files):
            if "delta" in event:
                yield answers.Delta(event["delta"])

    async def speak(
        self, text: str, *, model: str | None = None, **fields: Unpack[SpeechFields]
    ) -> Audio:
        """Returns the text as speech, a WAV file unless `response_format` says otherwise."""
        body = {"input": text, "response_format": "wav"}
        request, model = await self._request(SPEAK, model, fields, body, None)
        return await self._bounded(self._connection.answer(request, Audio), model)

    async def stream_speak(
        self, text: str, *, model: str | None = None, **fields: Unpack[SpeechFields]
    ) -> AsyncGenerator[Audio]:
        """Yields the sound of `speak` clause by clause, as bare samples (`pcm`) unless
        `response_format` says otherwise. The pieces joined in order are the whole sound."""
        body = {"input": text, "response_format": "pcm"}
        request, _ = await self._request(SPEAK, model, fields, body, None)
        async for piece, kind in self._connection.pieces(request):
            yield Audio(piece, kind)

    async def vad(
        self, sound: AudioLike, *, model: str | None = None, **fields: Unpack[VadFields]
    ) -> answers.Speech:
        """Finds the stretches of a recording that have speech in them, in seconds."""
        files = await _sound_file(sound)
        return await self._read(VAD, model, fields, {}, answers.speech, files)

    # -- any path --------------------------------------------------------------------------------

    async def request(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        model: str | None = None,
        **fields: Unpack[Fields],
    ) -> Json:
        """One use of a model on any path that it serves: a capability of your own, or a route that
        has no method here. Returns the fields of its JSON. Pictures and Audio in `body` are sent as
        files."""
        files: Files = {
            name: (name, value.data, value.content_type)
            for name, value in body.items()
            if isinstance(value, Picture | Audio)
        }
        rest = {name: value for name, value in body.items() if name not in files}
        return await self._read(path, model, fields, rest, _fields, files)

    # -- one way for all -------------------------------------------------------------------------

    async def _read(
        self,
        path: str,
        model: str | None,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        read: Callable[[Json], T],
        files: Files | None = None,
    ) -> T:
        """One request, and what `read` makes of its JSON."""
        request, model = await self._request(path, model, fields, body, files)
        return await self._bounded(self._connection.answer(request, of_json(read)), model)

    async def _events(
        self,
        path: str,
        model: str | None,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        files: Files | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        request, _ = await self._request(path, model, fields, body, files)
        async for event in self._connection.events(request):
            yield event

    async def _bounded(self, work: Awaitable[T], model: str) -> T:
        """Raises DeadlineUnmet where the budget is over first."""
        if self._budget is None:
            return await work
        try:
            async with asyncio.timeout(self._budget.until_s - time.monotonic()):
                return await work
        except TimeoutError:
            raise self._budget.unmet(model) from None

    async def _request(
        self,
        path: str,
        model: str | None,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        files: Files | None,
    ) -> tuple[Request, str]:
        """Returns the request, once its fields are checked, and the name of its model. Raises
        BadRequest; DeadlineUnmet once the budget is over; TypeError where no model is named."""
        name = model or self._default_model
        if not name:
            raise TypeError("name a `model`, for this call or for the client")
        body_fields = {"model": name, **body, **fields}
        body_fields.update(body_fields.pop("extra_body", {}))
        if self._budget is not None:
            body_fields["x_deadline_s"] = min(
                self._budget.left_s(name), body_fields.get("x_deadline_s", self._budget.budget_s)
            )
        _check(path, body_fields, files or {})
        if files:
            return Request("POST", path, form=body_fields, files=files), name
        return Request("POST", path, json=body_fields), name


def _fields(body: Json) -> Json:
    return body


def _check(path: str, fields: Mapping[str, Any], files: Files) -> None:
    """Checks a body as the front reads it: of a file its size, and of a field that a form repeats
    the last. Raises BadRequest."""
    sizes = {name: len(content) for name, (_, content, _) in files.items()}
    last = {name: v[-1] if files and isinstance(v, list) else v for name, v in fields.items()}
    check_body(SCHEMAS.get(path, OF_THE_TABLE).body, last | sizes)


async def _sound_file(sound: AudioLike) -> Files:
    audio = await asyncio.to_thread(audio_of, sound)
    return {"file": ("sound", audio.data, audio.content_type)}


async def _picture_messages(
    pictures: PictureLike | Sequence[PictureLike], question: str
) -> list[Json]:
    several = [pictures] if isinstance(pictures, PictureLike) else pictures
    loaded = [await asyncio.to_thread(picture_of, one) for one in several]
    return messages.written([{"role": "user", "content": [question, *loaded]}])


async def _path_and_files(
    picture: PictureLike | None, mask: PictureLike | None
) -> tuple[str, Files]:
    """The path, and the files of an edit."""
    files: Files = {}
    for name, source in (("image", picture), ("mask", mask)):
        if source is not None:
            loaded = await asyncio.to_thread(picture_of, source)
            files[name] = (name, loaded.data, loaded.content_type)
    return (EDIT if files else DRAW), files
