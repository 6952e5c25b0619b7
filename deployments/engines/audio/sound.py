"""Sound in files: bytes to samples, bounded at each step, and samples to bytes as they are made.

    samples = decode(raw, most_s=1800)                # one channel, 16 kHz; raises BadSound
    for part in SoundFile(raw, most_s=1800).parts(): ...              # the same, ten seconds each
    encoder = Encoder("mp3", rate_hz=22_050)
    pieces = [encoder.add(clause) for clause in clauses] + [encoder.end()]

FFmpeg, through PyAV, reads whatever container people have. A file is a stranger's: only formats
that carry their own sound are read, because a playlist would have FFmpeg open what it names.
Source: ffmpeg.org/ffmpeg-formats.html, `format_whitelist`.
"""

import ctypes
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import av
import numpy as np

from deployments.engines.asgi import BadField

HEARD_HZ = 16_000  # what Whisper and Silero listen to

# The containers that are read, by FFmpeg's names: those of OpenAI's list and similar ones. There is
# no playlist (hls, concat, dash, sdp), image or script among them.
FORMATS = (
    "aac,aiff,amr,au,caf,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,wav,w64"
)
# Sound outside these is no speech; a file that says 1 Hz would grow 16,000-fold in the resampler.
RATES_HZ, MOST_CHANNELS = range(4_000, 768_001), 32
PART = 312 * 512  # samples decoded at once: ten seconds, in whole frames of Silero's
# Samples of a file that are kept for its next reading: a minute, in 1.9 MB. A longer file is
# decoded again, 600 times faster than it is spoken.
KEPT = 60 * HEARD_HZ
LEAST_S = 0.1  # OpenAI's own bound
# One packet may be broken; this many in a row are no sound.
MOST_BROKEN_FRAMES = 100
# Changes of rate or channels in a file; a file that was joined from others has a few. Each change
# takes a new resampler, 0.5 ms, and a file could change with each frame, after 1 ms of sound.
MOST_CHANGES = 64
OPEN_S = 10.0  # to find the streams of a file, which is in memory
# FFmpeg unpacks the header of a QuickTime file and the tags of an MP3, where they are compressed,
# to whatever length they declare: 400 KB became 400 MB. Sound itself it unpacks packet by packet.
COMPRESSED_HEADER = b"dcomzlib"
_TAG = re.compile(rb"ID3([^\xff]{2}.[\x00-\x7f]{4})", re.DOTALL)  # as FFmpeg knows one
MOST_TAGS = 8  # in front of a file; most have one
# A header of a few bytes may declare millions of samples, for each of which FFmpeg allocates 35
# bytes before it reads any: 4.5 KB became gigabytes. FFmpeg therefore refuses to allocate a larger
# block, in the whole process. This one holds the index of half an hour of frames of 2.5 ms; a file
# with a larger picture in it is refused. Each stream has such blocks of its own, and up to five
# copies of its header; a film has sound, a picture and what its camera noted. What is left to a
# hostile file is 0.2 GB by samples, 0.4 GB by headers that are compressed in a Matroska file.
# Source: ffmpeg.org/doxygen/trunk/mem_8h.html, `av_max_alloc`.
MOST_BLOCK_BYTES, MOST_STREAMS = 17 << 20, 8
ctypes.CDLL(av._core.__file__).av_max_alloc(ctypes.c_size_t(MOST_BLOCK_BYTES))
# A list of edits says which parts of a film are played, and how often: 45 KB became minutes of
# work. Films that people cut have a few edits; a longer list is ignored.
MOST_EDITS = 16
_EDITS = re.compile(rb"elst(?=.{4}(.{4}))", re.DOTALL)
# Each packet is 10 us of work, with a sample or a thousand in it. TrueHD has the shortest packets
# of those that people have, 1,200 in a second. A file may have some more, as at its begin.
MOST_PACKETS_PER_S, SPARE_PACKETS = 2_000, 1_000
# PyAV returns all frames of a packet at once, and a packet may have thousands of them, each of some
# ten bytes that become megabytes. Files of people have one frame in a packet: at most 4 KiB of
# these codecs, whose decoders take several, and 0.2 MiB of the largest that loses nothing. Marks of
# a frame also come up by chance, one of FLAC in 32 KiB; twice as many and a few more are refused.
SEVERAL_FRAMES = frozenset({"aac", "aac_latm", "mp1", "mp2", "mp3", "ac3", "eac3"})
MOST_PACKET_BYTES, MOST_BYTES_OF_SEVERAL = 512 << 10, 32 << 10
_MARKS = {"flac": re.compile(rb"\xff[\xf8\xf9]"), "wavpack": re.compile(rb"wvpk")}
SPARE_MARKS, BYTES_OF_A_MARK = 8, 16 << 10


class BadSound(BadField):
    """A file that cannot be heard, or is too long: the field `file` of its request."""

    def __init__(self, message: str) -> None:
        super().__init__("file", f"`file`: {message}")


def _refuse_to_open(url: str, flags: int, options: dict[str, Any]) -> NoReturn:
    raise BadSound("the file refers to another file")


def decode(raw: bytes, most_s: float) -> np.ndarray:
    """Returns int16 samples, shape [n], at HEARD_HZ; `floats` of a part is what models take. Raises
    BadSound."""
    return np.concatenate(list(parts(raw, most_s, HEARD_HZ)))


def parts(raw: bytes, most_s: float, count: int) -> Iterator[np.ndarray]:
    """Yields what `decode` returns in parts of `count` samples, the last one of what is left.
    Raises BadSound, also behind some parts."""
    heard_count = 0
    try:
        with av.open(
            io.BytesIO(_without_headers_to_unpack(raw)),
            metadata_errors="ignore",
            timeout=OPEN_S,
            io_open=_refuse_to_open,
            container_options=_options(raw),
        ) as container:
            for part in _in_parts(_read(container, most_s), count):
                heard_count += len(part)
                _check_least(heard_count)
                yield part
    except (av.FFmpegError, ValueError, EOFError, OSError) as error:
        why = error.strerror if isinstance(error, av.FFmpegError) else error
        if isinstance(error, MemoryError):
            most_mib = MOST_BLOCK_BYTES >> 20
            why = f"it has more than {MOST_STREAMS} streams, or a header above {most_mib} MiB"
        raise BadSound(f"no sound that can be read: {why}") from error
    _check_least(heard_count)


def _options(raw: bytes) -> dict[str, str]:
    lists = _EDITS.finditer(raw)  # one at a time, because a hostile file has millions
    has_many_edits = any(int.from_bytes(edits[1], "big") > MOST_EDITS for edits in lists)
    return {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "",
        "max_streams": str(MOST_STREAMS),
        "ignore_editlist": str(int(has_many_edits)),
    }


def _check_least(count: int) -> None:
    if count < LEAST_S * HEARD_HZ:
        raise BadSound(f"{count / HEARD_HZ:.3f} s of sound; it takes {LEAST_S} s")


def _in_parts(pieces: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    """Yields samples of pieces of any length in parts of `count`, and what is left."""
    held: list[np.ndarray] = []
    missing = count
    for piece in pieces:
        begin = 0
        while len(piece) - begin >= missing:
            yield np.concatenate([*held, piece[begin : begin + missing]])
            begin, held, missing = begin + missing, [], count
        if begin < len(piece):
            held.append(piece[begin:])
            missing -= len(piece) - begin
    if held:
        yield np.concatenate(held)


class SoundFile:
    """The sound of a file, decoded part by part for each reading, so that a long one takes no more
    memory than a short one. `count`: of its samples, once it was read to its end."""

    def __init__(self, raw: bytes, most_s: float) -> None:
        self._raw, self._most_s = raw, most_s
        self.count = 0
        self._kept: list[np.ndarray] | None = None

    def parts(self) -> Iterator[np.ndarray]:
        """Yields what `decode` returns in parts of PART samples. Raises BadSound."""
        if self._kept is not None:
            yield from self._kept
            return
        count = 0
        pending: list[np.ndarray] = []
        for part in parts(self._raw, self._most_s, PART):
            count += len(part)
            if count <= KEPT:
                pending.append(part)
            else:
                pending.clear()
            yield part
        self.count = count
        if count <= KEPT:
            self._kept = pending


class Window:
    """Reads samples at any place of a file that comes in parts, and keeps only what may still be
    asked for."""

    def __init__(self, parts: Iterable[np.ndarray]) -> None:
        self._parts = iter(parts)
        self._held, self._begin = np.zeros(0, np.int16), 0

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns the samples between two places. `begin` must never be before that of an earlier
        call."""
        self._forget(begin)
        while self._begin + len(self._held) < end:
            self._held = np.concatenate([self._held, next(self._parts)])
            self._forget(begin)
        return self._held[begin - self._begin : end - self._begin]

    def _forget(self, begin: int) -> None:
        gone = min(begin - self._begin, len(self._held))
        self._held, self._begin = self._held[gone:], self._begin + gone


def _without_headers_to_unpack(raw: bytes) -> bytes:
    """Returns a file without the tags that FFmpeg would unpack without bound. Tags at its begin are
    cut off; the marks of further tags, as in a chunk of a WAV, are overwritten. Raises BadSound for
    a compressed header."""
    if COMPRESSED_HEADER in raw:
        raise BadSound("a compressed header is not read; write the file without")
    begin = 0
    for _ in range(MOST_TAGS):
        if not (match := _TAG.match(raw, begin)):
            break
        *_, flags, a, b, c, d = match[1]
        footer_bytes = match.end() - begin if flags & 0x10 else 0
        begin = match.end() + (a << 21 | b << 14 | c << 7 | d) + footer_bytes
    return _TAG.sub(rb"___\1", raw[begin:])


def floats(samples: np.ndarray) -> np.ndarray:
    """int16 to float32 in [-1, 1]."""
    return samples.astype(np.float32) / 32_768.0


def _read(container: Any, most_s: float) -> Iterator[np.ndarray]:
    """Yields 16-bit samples of the first sound in a container. Raises BadSound."""
    if not container.streams.audio:
        raise BadSound("the file has no sound in it")
    stream = container.streams.audio[0]
    for declared_s in (
        container.duration / av.time_base if container.duration else 0.0,
        float(stream.duration * stream.time_base) if stream.duration else 0.0,
    ):
        if declared_s > most_s:
            raise BadSound(f"the file declares {declared_s:.0f} s; at most {most_s:.0f} s are read")
    for samples in _resampled(_frames(container, stream, most_s)):
        yield samples.to_ndarray().reshape(-1)


def _resampled(frames: Iterator[Any]) -> Iterator[Any]:
    """Resamples frames to HEARD_HZ. A resampler takes frames of one kind only, so each run of equal
    frames has its own; a frame of None makes it give out its rest. Raises BadSound."""
    for changes_count, (_, alike) in enumerate(itertools.groupby(frames, _kind)):
        if changes_count > MOST_CHANGES:
            raise BadSound(f"its rate or channels change more than {MOST_CHANGES} times")
        resampler = av.AudioResampler(format="s16", layout="mono", rate=HEARD_HZ)
        for frame in itertools.chain(alike, [None]):
            yield from resampler.resample(frame)


def _kind(frame: Any) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _frames(container: Any, stream: Any, most_s: float) -> Iterator[Any]:
    """Decoded frames. A broken frame is skipped, as players do. Raises BadSound for frames that no
    speech has, for packets with hardly a sample, and beyond `most_s`."""
    broken, decoded_s, excess = 0, Fraction(0), 0.0
    codec = stream.codec_context.codec.canonical_name
    for packet in container.demux(stream):
        excess += 1
        _check_packet(packet, codec)
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            broken += 1
            if broken > MOST_BROKEN_FRAMES:
                raise
            continue
        for frame in frames:
            channels = frame.layout.nb_channels
            if frame.sample_rate not in RATES_HZ or not 1 <= channels <= MOST_CHANNELS:
                raise BadSound(f"{channels} channels of {frame.sample_rate} Hz are not read")
            decoded_s += Fraction(frame.samples, frame.sample_rate)
            if decoded_s > most_s:
                raise BadSound(f"longer than {most_s:.0f} s, the most that is read")
            excess = max(0.0, excess - MOST_PACKETS_PER_S * frame.samples / frame.sample_rate)
            frame.pts = None  # samples count, not what the file says of their time
            yield frame
        if excess > SPARE_PACKETS:
            raise BadSound(f"more than {MOST_PACKETS_PER_S} packets in a second are not read")


def _check_packet(packet: Any, codec: str) -> None:
    """Raises BadSound for a packet that may have very many frames."""
    if codec.startswith("pcm_"):
        return  # it grows fourfold at most
    most = MOST_BYTES_OF_SEVERAL if codec in SEVERAL_FRAMES else MOST_PACKET_BYTES
    if packet.size > most:
        raise BadSound(f"a packet of {packet.size} bytes of {codec} is not read; at most {most}")
    if marks := _MARKS.get(codec):
        most_frames = SPARE_MARKS + packet.size // BYTES_OF_A_MARK
        if sum(1 for _ in marks.finditer(bytes(packet))) > most_frames:
            raise BadSound(f"a packet of more than {most_frames} frames is not read")


class _Sink:
    """A file that cannot seek, emptied after each write of the encoder."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken


class Form(NamedTuple):
    """How one of OpenAI's response formats is written."""

    media_type: str
    container: str
    codec: str
    rate_hz: int  # 0: that of the voice
    bits_per_s: int  # 0: the codec loses nothing


# Formats that do not tell their length are encoded at 48 kHz, at which a frame and the encoder's
# delay are shortest: mp3 and aac then end within 50 ms of the speech. OpenAI's pcm has 24 kHz.
WRITTEN = {
    "mp3": Form("audio/mpeg", "mp3", "libmp3lame", 48_000, 64_000),
    "opus": Form("audio/ogg", "ogg", "libopus", 48_000, 32_000),
    "aac": Form("audio/aac", "adts", "aac", 48_000, 64_000),
    "flac": Form("audio/flac", "flac", "flac", 0, 0),
    "wav": Form("audio/wav", "wav", "pcm_s16le", 0, 0),
    "pcm": Form("audio/pcm", "s16le", "pcm_s16le", 24_000, 0),
}
# Formats whose header has the length of the sound. In a stream the header says that the length is
# unknown, which many readers refuse.
KNOW_THEIR_LENGTH = frozenset({"wav", "flac"})
PAGE_US = "100000"  # of Ogg: 0.1 s, so that a clause leaves when it is spoken


class Encoder:
    """Encodes samples to the bytes of a format, piece by piece, or as one whole file."""

    def __init__(self, form: str, rate_hz: int, *, whole: bool = False) -> None:
        """`whole`: all bytes come at the end, so that the header can say the length."""
        written = WRITTEN[form]
        self._rate_hz, self._whole, self._count = rate_hz, whole, 0
        self._sink: Any = io.BytesIO() if whole else _Sink()
        options = {"page_duration": PAGE_US} if written.container == "ogg" else {}
        self._container = av.open(
            self._sink, "w", format=written.container, container_options=options
        )
        self._stream: Any = self._container.add_stream(
            written.codec, rate=written.rate_hz or rate_hz, layout="mono"
        )
        if written.bits_per_s:
            self._stream.bit_rate = written.bits_per_s

    def add(self, samples: np.ndarray) -> bytes:
        """`samples`: float32 in [-1, 1], shape [n], of which n may be 0. Returns what is ready."""
        if not samples.size:  # FFmpeg takes no frame without samples
            return b""
        self._count += samples.size
        pcm = (np.clip(samples, -1.0, 1.0) * 32_767.0).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate = self._rate_hz
        self._mux(frame)
        return b"" if self._whole else self._sink.take()

    def end(self) -> bytes:
        """Returns the rest; no call may follow. Silence makes up LEAST_S: without a sample some
        formats have no byte, and others only a header, which no reader takes for a file."""
        missing_count = int(LEAST_S * self._rate_hz) - self._count
        silence = self.add(np.zeros(max(0, missing_count), np.float32))
        self._mux(None)
        self._container.close()
        return self._sink.getvalue() if self._whole else silence + self._sink.take()

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
