"""Transcription by a Whisper model on vLLM, whose batch takes pieces of several requests at once.

A piece is one prompt of the decoder, with times, as Whisper was trained: `<|startofprev|>` and the
request's prompt, if any, then `<|startoftranscript|>`, language, task and `<|0.00|>`. vLLM's own
route is not used: it would read any container, also playlists that name other files, knows two
forms of answers, and has a text without a closing time fall away (0.32, speech_to_text/base).
Source: github.com/openai/whisper, transcribe.py.
"""

import itertools
import zlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm import SamplingParams
from vllm.inputs import ExplicitEncoderDecoderPrompt, TextPrompt, TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.engines.audio import sound
from deployments.engines.audio.hearing import Hearing
from deployments.engines.audio.sound import HEARD_HZ
from deployments.engines.audio.transcript import Transcript

STEP_S = 0.02  # between two tokens of time
# Whisper's own bounds: what repeats itself more, or was less sure, is heard again, warmer.
MOST_COMPRESSION, LEAST_LOGPROB = 2.4, -1.0
MULTILINGUAL_TOKENS = 51_865  # a model with fewer was trained on English alone


@dataclass(slots=True)
class Segment:
    """What OpenAI's `verbose_json` says of a part. `start`, `end`: seconds from the begin of the
    file. `seek`: of its piece, in frames of 10 ms."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float


@dataclass(frozen=True, slots=True)
class DecodedPiece:
    """What one run over a piece gave. `avg_logprob`: the mean over its tokens."""

    tokens: list[int]
    text: str
    avg_logprob: float
    temperature: float

    @property
    def is_plausible(self) -> bool:
        """Says whether the model was sure of it and did not repeat itself."""
        is_sure = self.avg_logprob >= LEAST_LOGPROB
        return is_sure and compression_ratio(self.text) <= MOST_COMPRESSION


class WhisperHearing(Hearing):
    """One model. vLLM gives no times of words."""

    granularities: tuple[str, ...] = ("segment",)
    piece_s = 30  # the window of the encoder

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        super().__init__(name, {})
        self.llm, self.tokenizer = llm, llm.get_tokenizer()
        self._numbers = itertools.count()
        self.end: int = self._token("<|endoftext|>")
        # Times follow this one, also where the tokenizer has no names for them.
        self.times_from: int = self._token("<|notimestamps|>") + 1

    def _token(self, text: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(text))

    @property
    def is_multilingual(self) -> bool:
        return int(self.llm.model_config.hf_config.vocab_size) >= MULTILINGUAL_TOKENS

    def knows(self, language: str) -> bool:
        """The first models have no token for what later ones know."""
        if not self.is_multilingual:
            return language == "en"
        return language in LANGUAGES and self._token(f"<|{language}|>") > self.end

    def probe_prompt(self) -> ExplicitEncoderDecoderPrompt:
        """A second of silence, of which a model says which language it is."""
        return self._prompt(np.zeros(HEARD_HZ, np.int16), [self._token("<|startoftranscript|>")])

    async def hear(
        self, transcript: Transcript, pieces: Iterator[tuple[int, np.ndarray]]
    ) -> AsyncGenerator[Any, None]:
        async for begin, samples in self.worker.each(pieces):
            if not transcript.language:
                transcript.language = await self._language(samples)
            decoded = await self._decoded(transcript, samples)
            for segment in self._segments(decoded, begin, len(samples)):
                segment.id = len(transcript.segments)
                transcript.segments.append(segment)
                yield segment

    async def _language(self, samples: np.ndarray) -> str:
        tokens = {self._token(f"<|{code}|>"): code for code in LANGUAGES if self.knows(code)}
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(tokens))
        first = [self._token("<|startoftranscript|>")]
        output = await self._generate(self._prompt(samples, first), params)
        return tokens[output.token_ids[0]]

    async def _decoded(self, transcript: Transcript, samples: np.ndarray) -> DecodedPiece:
        """Greedy first, and warmer where that repeats itself or is unsure."""
        first = self._decoder_tokens(transcript)
        most_tokens = self.llm.model_config.max_model_len - len(first)
        for temperature in transcript.request.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=most_tokens, logprobs=0)
            output = await self._generate(self._prompt(samples, first), params)
            tokens = [token for token in output.token_ids if token != self.end]
            mean = (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
            decoded = DecodedPiece(tokens, self._text(tokens), mean, temperature)
            if decoded.is_plausible:
                break
        return decoded

    def _decoder_tokens(self, transcript: Transcript) -> list[int]:
        """What the decoder begins with. Of a long prompt its end counts, as Whisper has it."""
        request = transcript.request
        names = ["<|startoftranscript|>"]
        if self.is_multilingual:
            names += [f"<|{transcript.language}|>", f"<|{request.task}|>"]
        before: list[int] = []
        if request.prompt:
            ids = self.tokenizer.encode(f" {request.prompt.strip()}", add_special_tokens=False)
            # A client's text may spell a token that is no text.
            words = [token for token in ids if token < self.end]
            most = self.llm.model_config.max_model_len // 2 - 1
            before = [self._token("<|startofprev|>"), *words[-most:]]
        return [*before, *map(self._token, names), self.times_from]

    def _prompt(self, samples: np.ndarray, first: list[int]) -> ExplicitEncoderDecoderPrompt:
        audio = {"audio": (sound.floats(samples), HEARD_HZ)}
        return ExplicitEncoderDecoderPrompt(
            encoder_prompt=TextPrompt(prompt="", multi_modal_data=audio),
            decoder_prompt=TokensPrompt(prompt_token_ids=first),
        )

    async def _generate(self, prompt: ExplicitEncoderDecoderPrompt, params: SamplingParams) -> Any:
        number = f"hear-{next(self._numbers)}"
        return [out async for out in self.llm.generate(prompt, params, number)][-1].outputs[0]

    def _segments(self, decoded: DecodedPiece, begin: int, count: int) -> Iterator[Segment]:
        """Cuts a piece where it has times. The begin of a part without one is the end of the part
        before, its end that of the piece."""
        start_s, piece_s = 0.0, count / HEARD_HZ
        words: list[int] = []
        for token in [*decoded.tokens, None]:
            if token is not None and token < self.times_from:
                words.append(token)
                continue
            at_s = piece_s if token is None else min(piece_s, (token - self.times_from) * STEP_S)
            text = self._text(words)
            if text.strip():
                offset_s = begin / HEARD_HZ
                yield Segment(
                    0,
                    round(offset_s * 100),
                    round(offset_s + start_s, 2),
                    round(offset_s + at_s, 2),
                    text,
                    words,
                    decoded.temperature,
                    decoded.avg_logprob,
                    compression_ratio(text),
                )
            start_s, words = at_s, []

    def _text(self, tokens: list[int]) -> str:
        words = [token for token in tokens if token < self.end]
        return str(self.tokenizer.decode(words, skip_special_tokens=True))


def compression_ratio(text: str) -> float:
    """Returns by how much a text can be compressed: much where it repeats itself."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0
