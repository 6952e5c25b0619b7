"""Embeddings through sentence-transformers, in OpenAI's shapes.

`engine_args`: `device` (default: a GPU when there is one, else cpu), `max_batch` (texts per
forward pass, 32), `threads` (CPU threads of torch; default: the model's, else 1), `matryoshka` (the
model was trained so that a prefix of its vector is a vector: `dimensions` is honoured, false).

Requests that wait while a batch runs become the next batch. There is no timer: a lone request never
waits for others, and many requests fill the batch by themselves.
"""

import asyncio
import base64
import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from deployments.engines import asgi, dispatch_lock, host_copy, pickles
from deployments.engines.asgi import BadField
from deployments.engines.one_thread import PASS_MOST_S, OneThread
from deployments.engines.protocol import Config, Receive, Scope, Send

MAX_TEXTS = 2048  # OpenAI's own bound on one request
MAX_CHARS = 8 << 20  # of all texts of a request: 2,048 of 4,096 characters, or of 1,000 tokens
MAX_BODY_BYTES = 32 << 20  # these characters, where each has four bytes
# To count the tokens of a text takes 500 bytes and 2 us for each, so a text far beyond the window
# is refused by its length. Prose has 4 to 6 characters a token, and the words of vocabularies have
# up to 20; the rest is for runs of blanks, and for words that are one unknown token at any length.
MAX_CHARS_PER_TOKEN = 64
# Of texts whose tokens are counted in one turn: at most 0.1 s, beside one text of any length.
COUNTED_CHARS = 64 << 10
# The window of a model that reads any length, as a static one does: that of other long models.
MOST_WINDOW = 32_768
# A field of vLLM's API, and its value for texts that are to be cut to the model's window.
CUT, CUT_TO_FIT = "truncate_prompt_tokens", -1
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON may carry half of a pair; no tokenizer takes it
_PROBE = "The probe of an embedding model."


class NotFinite(asgi.RequestFailed):
    """The model computed no vector that JSON can carry, or that compares with another."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return (
            f"the model computed a vector with NaN or infinity for input {self.number}; send the"
            " others without it, and see whether the model's weights are whole"
        )


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One checked request."""

    texts: list[str]
    dimensions: int | None
    as_base64: bool
    is_cut: bool = False  # a text longer than the model's window is cut; False: it is refused

    def within(self, window: int) -> "EmbeddingRequest":
        """Returns the request with its texts cut to the length up to which tokens are counted, if
        they are to be cut at all."""
        if not self.is_cut:
            return self
        return replace(self, texts=[text[: most_chars(window)] for text in self.texts])


@dataclass(frozen=True, slots=True)
class QueuedTexts:
    """One request's texts in the queue, and the future that gets their vectors."""

    texts: list[str]
    answer: asyncio.Future[np.ndarray]


def build(config: Config) -> "EmbeddingEngine":
    return EmbeddingEngine(config)


def spread(parts: list[int]) -> dict[str, Any]:
    """Arguments by which transformers spreads layers over the GPUs of a ticket; `parts`: bytes on
    each."""
    return {"device_map": "auto", "max_memory": dict(enumerate(parts))} if parts else {}


def module_folders(model: Path) -> list[Path]:
    """The folders that the library reads: the model's own, and one for each of its modules."""
    listed = model / "modules.json"
    modules = json.loads(listed.read_text()) if listed.is_file() else []
    return [model, *(model / module["path"] for module in modules if module["path"])]


class EmbeddingEngine:
    """One model, one worker thread, one queue."""

    def __init__(self, config: Config) -> None:
        args, self.config = config.get("engine_args", {}), config
        self.path, self.name = config["model"], config.get("served_name", config["model"])
        self.can_sleep: bool = config.get("can_sleep", True)
        self.device: str | None = args.get("device")
        self.parts: list[int] = config.get("parts", [])
        self.max_batch, self.matryoshka = args.get("max_batch", 32), args.get("matryoshka", False)
        self.threads: int = args.get("threads", config.get("threads", 1))
        self.dispatch_lock = dispatch_lock.DispatchLock(config.get("dispatch_lock"))
        self.queue: asyncio.Queue[QueuedTexts] = asyncio.Queue()
        self.parked: host_copy.HostCopy | None = None
        self.model: Any = None
        self._counting: Any = None
        self._prompt = ""  # what the library puts before each text, where the model's files say so
        self._counter = OneThread("count")  # starts its thread with the first request
        self.worker = OneThread("embed", PASS_MOST_S)  # starts its thread with the load
        self.batching: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Loads the model. A second call, after a wake that did not verify, keeps worker and
        batching task, because two of each would run the model side by side."""
        await self._work(self._load)
        if self.batching is None or self.batching.done():
            self.batching = asyncio.create_task(self._batch_for_ever())

    def _load(self) -> None:
        self.model = None  # a model that is replaced leaves first: the ticket is for one model
        torch.set_num_threads(self.threads)
        for folder in module_folders(Path(self.path)):
            pickles.refuse(folder)
        self.model = SentenceTransformer(
            self.path,
            device=self.device,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, **spread(self.parts)},
        )
        self.model.eval()
        self.model.register_forward_pre_hook(lambda *_: self.worker.note_step())
        # A copy, because tokens are counted beside the worker's batches, and a call of a tokenizer
        # sets how it pads.
        self._counting = copy.deepcopy(self.model.tokenizer)
        window = self.model.max_seq_length
        self.window = int(window) if window and math.isfinite(window) else MOST_WINDOW
        if isinstance(self._counting, Tokenizer):  # of a static model, which does not cut by itself
            self.model.tokenizer.enable_truncation(self.window)
        self._prompt = self.model.prompts.get(self.model.default_prompt_name) or ""
        host_copy.own(self.model)
        self.width = int(self.model.get_embedding_dimension())

    async def sleep(self) -> None:
        self.parked = await self._work(host_copy.offload, self.model, self.name, self.config)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        assert self.parked is not None
        await self._work(host_copy.restore, self.parked)
        self.parked = None

    async def probe(self) -> str:
        vectors = await self._embed([_PROBE])
        if _on_cpu(self.model):
            return str(vectors[0].tobytes().hex())
        return str(vectors[0].round(4).tolist())  # a list: of an array `str` would leave out most

    async def health(self) -> None:
        assert self.batching and not self.batching.done(), "the batching task has ended"
        self.worker.check()
        self._counter.check()

    async def _work(self, function: Any, *args: Any) -> Any:
        """Runs a function in the one thread that touches the model."""
        return await self.worker.run(function, *args)

    async def _embed(self, texts: list[str]) -> np.ndarray:
        """Queues one pass of the request at a time, so that requests take turns, and the work for a
        client that leaves ends with the pass under way. Texts of similar lengths share a pass,
        because a pass pads all texts to the longest."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        batches = []
        for start in range(0, len(order), self.max_batch):
            answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
            part = [texts[number] for number in order[start : start + self.max_batch]]
            self.queue.put_nowait(QueuedTexts(part, answer))
            batches.append(await answer)
        vectors: np.ndarray = np.concatenate(batches)[np.argsort(order)]
        return vectors

    async def _batch_for_ever(self) -> None:
        while True:
            if batch := await self._next_batch():
                work = asyncio.ensure_future(self._work(self._encode, [w.texts for w in batch]))
                await asyncio.wait({work})
                if work.exception() and len(batch) > 1:
                    await self._each_alone(batch)
                else:
                    _hand_out(batch, work)

    async def _each_alone(self, batch: list[QueuedTexts]) -> None:
        """Computes each request of a failed pass alone, so that only the request at fault fails."""
        for waiting in batch:
            if not waiting.answer.done():
                work = asyncio.ensure_future(self._work(self._encode, [waiting.texts]))
                await asyncio.wait({work})
                _hand_out([waiting], work)

    async def _next_batch(self) -> list[QueuedTexts]:
        """Waits for a request, and takes all others that fit into its batch."""
        batch = [await self.queue.get()]
        size = len(batch[0].texts)
        while not self.queue.empty() and size < self.max_batch:
            batch.append(self.queue.get_nowait())
            size += len(batch[-1].texts)
        return [waiting for waiting in batch if not waiting.answer.cancelled()]

    def _encode(self, requests: list[list[str]]) -> list[np.ndarray]:
        texts = [text for request in requests for text in request]
        with self.worker.holding(self.dispatch_lock.one()), torch.inference_mode():
            vectors = self.model.encode(
                texts, batch_size=self.max_batch, show_progress_bar=False, convert_to_numpy=True
            )
        ends = np.cumsum([len(request) for request in requests])
        return list(np.split(vectors.astype(np.float32), ends[:-1]))

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            card = {"id": self.name, "object": "model", "owned_by": "serve-arbiter", "created": 0}
            return await asgi.respond(send, 200, {"object": "list", "data": [card]})
        if scope["path"] != "/v1/embeddings" or scope["method"] != "POST":
            return await asgi.refuse(send, 404, f"no route {scope['method']} {scope['path']}")
        try:
            body = await asgi.read_body(receive, MAX_BODY_BYTES)
            if body is None:
                return
            request = parse(body, self.width, matryoshka=self.matryoshka).within(self.window)
            check_lengths(request.texts, self.window)
            counting = self._counted(request.texts, is_cut=request.is_cut)
            tokens = await asgi.until_disconnected(counting, receive)
            if tokens is None:
                return
            answer = await self._answer_for(receive, request, tokens)
        except asgi.BodyTooLarge as error:
            return await asgi.refuse(send, 413, str(error), param="body")
        except (BadField, NotFinite) as error:
            return await asgi.refuse_request(send, error)
        if answer is not None:
            await asgi.send_bytes(send, "application/json", answer)

    async def _counted(self, texts: list[str], *, is_cut: bool) -> int:
        """The tokens of all texts, counted in a thread beside the worker's, in turns with other
        requests. Raises BadField."""
        total = 0
        async with aclosing(self._counter.each(self._counts(texts, is_cut=is_cut))) as counts:
            async for count in counts:
                total += count
        return total

    def _counts(self, texts: list[str], *, is_cut: bool = False) -> Iterator[int]:
        """Yields the tokens of the texts of each turn, each text with the model's prompt. Raises
        BadField for one longer than the model's window, where that is not to be cut: a vector of
        its beginning says nothing of the rest. One text at a time, so that no more than one text's
        tokens are in RAM, and none behind the first text that is too long."""
        total = chars = 0
        for number, text in enumerate(texts):
            count = self._tokens(self._prompt + text)
            if is_cut:
                count = min(count, self.window)  # as the library cuts what it encodes
            if count > self.window:
                message = (
                    f"input {number} has {count} tokens; this model reads at most {self.window}"
                )
                raise BadField("input", message)
            total, chars = total + count, chars + len(text)
            if chars >= COUNTED_CHARS:
                yield total
                total = chars = 0
        yield total

    def _tokens(self, text: str) -> int:
        if isinstance(self._counting, Tokenizer):
            return len(self._counting.encode(text, add_special_tokens=False).ids)
        return len(self._counting(text, truncation=False)["input_ids"])

    async def _answer_for(
        self, receive: Receive, request: EmbeddingRequest, tokens: int
    ) -> bytes | None:
        """The answer, or None when the client leaves first, which takes its texts off the queue."""
        return await asgi.until_disconnected(self._answer(request, tokens), receive)

    async def _answer(self, request: EmbeddingRequest, tokens: int) -> bytes:
        """OpenAI's, in JSON. Each vector is written in a turn of the loop: 2,048 of 1,024 floats
        take two seconds. Raises NotFinite."""
        vectors = shorten(await self._embed(request.texts), request.dimensions)
        if (unfit := ~np.isfinite(vectors).all(axis=1)).any():
            raise NotFinite(int(unfit.argmax()))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        frame: dict[str, Any] = {"object": "list", "data": []}
        frame |= {"model": self.name, "usage": usage}
        begin, end = json.dumps(frame).encode().split(b"[]", 1)
        encode = _base64 if request.as_base64 else _floats
        rows = []
        for index, vector in enumerate(vectors):
            row = {"object": "embedding", "index": index, "embedding": encode(vector)}
            rows.append(json.dumps(row).encode())
            await asyncio.sleep(0)
        return b"".join([begin, b"[", b", ".join(rows), b"]", end])


def _hand_out(batch: list[QueuedTexts], work: asyncio.Future[list[np.ndarray]]) -> None:
    """Gives each request its vectors; requests whose client has left are skipped."""
    if error := work.exception():
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        return
    for waiting, vectors in zip(batch, work.result(), strict=True):
        if not waiting.answer.done():
            waiting.answer.set_result(vectors)


def parse(raw: bytes, width: int, *, matryoshka: bool) -> EmbeddingRequest:
    """Reads a request for embeddings. Raises BadField that names the field."""
    body = asgi.json_object(raw)
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise BadField("encoding_format", f"{encoding!r} is not float or base64")
    dimensions = _dimensions(body.get("dimensions"), width, matryoshka=matryoshka)
    if (cut := body.get(CUT)) not in (None, CUT_TO_FIT):
        raise BadField(CUT, f"{cut!r} is not {CUT_TO_FIT}, which cuts texts to the model's window")
    return EmbeddingRequest(
        _texts(body.get("input")), dimensions, encoding == "base64", cut is not None
    )


def _texts(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise BadField("input", "expected text or a list of texts, not empty")
    if len(texts) > MAX_TEXTS:
        raise BadField("input", f"{len(texts)} texts; at most {MAX_TEXTS} in one request")
    for number, text in enumerate(texts):
        if isinstance(text, int | list):
            raise BadField("input", "token ids are not supported by this model; send text")
        if not isinstance(text, str) or not text:
            raise BadField("input", f"input {number} is not text, or is empty")
        if not text.isascii() and _SURROGATE.search(text):
            raise BadField("input", f"input {number} is not Unicode text: half of a pair in it")
    return texts


def most_chars(window: int) -> int:
    """Of a text whose tokens are counted."""
    return window * MAX_CHARS_PER_TOKEN


def check_lengths(texts: list[str], window: int) -> None:
    """Refuses what is too long to count its tokens. Raises BadField."""
    most = most_chars(window)
    for number, text in enumerate(texts):
        if len(text) > most:
            message = (
                f"input {number} has {len(text)} characters; this model reads at most {window}"
            )
            raise BadField("input", f"{message} tokens, and texts of {most} characters are counted")
    if (total := sum(map(len, texts))) > MAX_CHARS:
        message = f"the texts have {total} characters; at most {MAX_CHARS} in one request"
        raise BadField("input", message)


def _dimensions(value: object, width: int, *, matryoshka: bool) -> int | None:
    if value is None or value == width:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= width:
        raise BadField("dimensions", f"expected a number from 1 to {width}")
    if not matryoshka:
        raise BadField("dimensions", f"this model's vectors have {width} dimensions, not fewer")
    return value


def shorten(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The leading part of each vector, at unit length again."""
    if dimensions is None:
        return vectors
    short = vectors[:, :dimensions]
    return short / np.maximum(np.linalg.norm(short, axis=1, keepdims=True), 1e-12)


def _floats(vector: np.ndarray) -> Any:
    return vector.tolist()


def _base64(vector: np.ndarray) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _on_cpu(model: SentenceTransformer) -> bool:
    return bool(model.device.type == "cpu")
