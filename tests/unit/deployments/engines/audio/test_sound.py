"""Files of strangers: bounded before and while they are decoded, and nothing else is opened."""

import contextlib
import http.server
import io
import struct
import threading
import wave
from collections.abc import Callable, Iterator
from fractions import Fraction

import av
import numpy as np
import pytest

from arbiter.units import MIB
from deployments.engines.audio import sound
from tests.support import archives, films
from tests.support.speech import CONTAINERS, contained, seconds_of

RATE = 22_050
TONE = 0.3 * np.sin(2 * np.pi * 300 * np.arange(RATE * 3) / RATE).astype(np.float32)


def wav(seconds: float, rate: int = 16_000, channels: int = 1) -> bytearray:
    sink = io.BytesIO()
    with wave.open(sink, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"\0" * (2 * channels * int(seconds * rate)))
    return bytearray(sink.getvalue())


def encoded(form: str, *, whole: bool = False) -> bytes:
    encoder = sound.Encoder(form, RATE, whole=whole)
    parts = [encoder.add(part) for part in np.array_split(TONE, 3)]
    return b"".join([*parts, encoder.end()])


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """A server, and what it was asked for."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_error(404)

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x.ts", seen
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.spec("L2")
def test_file_that_names_other_files_is_refused_and_none_is_opened(
    asked: tuple[str, list[str]],
) -> None:
    url, seen = asked
    files = [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{url}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {url}\n",
        f'<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{url}</BaseURL></MPD>',
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
        "<svg xmlns='http://www.w3.org/2000/svg'></svg>",
    ]
    for text in files:
        with pytest.raises(sound.BadSound, match="no sound that can be read"):
            sound.decode(text.encode(), most_s=60)
    assert seen == []


@pytest.mark.spec("H4")
@pytest.mark.parametrize("form", [form for form in sound.WRITTEN if form != "pcm"])
@pytest.mark.parametrize("whole", [True, False])
def test_written_sound_is_read_again_with_its_duration(form: str, whole: bool) -> None:
    raw = encoded(form, whole=whole)
    assert seconds_of(raw) == pytest.approx(3.0, abs=0.05)
    heard = sound.decode(raw, most_s=60)
    assert len(heard) / sound.HEARD_HZ == pytest.approx(3.0, abs=0.05)
    assert np.abs(sound.floats(heard)).max() == pytest.approx(0.3, abs=0.05)


@pytest.mark.spec("H3")
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_that_people_have_are_read(container: str) -> None:
    raw = contained(TONE, RATE, *CONTAINERS[container])
    heard = sound.decode(raw, most_s=60)
    assert len(heard) / sound.HEARD_HZ == pytest.approx(3.0, abs=0.1)


@pytest.mark.spec("H3")
def test_files_of_several_rates_that_were_joined_are_read_to_the_end() -> None:
    joined = b"".join(contained(TONE, RATE, "adts", "aac", hz) for hz in (44_100, 24_000))
    heard = sound.decode(joined, most_s=60)
    with av.open(io.BytesIO(joined)) as container:
        decoded_s = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
    assert decoded_s > 6.0
    assert len(heard) / sound.HEARD_HZ == pytest.approx(decoded_s, abs=0.0005)
    loudness = np.abs(sound.floats(heard))[: 16_000 * 5].reshape(5, -1).mean(axis=1)
    assert loudness.min() > 0.15


@pytest.mark.spec("H3", "L2", "L3")
def test_rate_that_changes_again_and_again_is_refused_before_all_of_it_is_decoded() -> None:
    """For each change a resampler is made, and of a change for each frame none would be heard."""
    one, other = (contained(TONE[:2_000], RATE, "adts", "aac", hz) for hz in (44_100, 24_000))
    few = (one + other) * (sound.MOST_CHANGES // 2)
    assert len(sound.decode(few, most_s=60)) > 6 * sound.HEARD_HZ
    with pytest.raises(sound.BadSound, match="change more than 64 times"):
        sound.decode(few + one + other, most_s=60)


@pytest.mark.spec("H4")
def test_pieces_of_a_stream_come_before_its_end() -> None:
    for form in sound.WRITTEN:
        encoder = sound.Encoder(form, RATE)
        first = b"".join(encoder.add(TONE) for _ in range(2))
        assert len(first) > len(encoder.end()), form
    whole = sound.Encoder("wav", RATE, whole=True)
    assert whole.add(TONE) == b"" and whole.end()[:4] == b"RIFF"


@pytest.mark.spec("H4")
@pytest.mark.parametrize("form", sound.WRITTEN)
def test_clause_without_a_sample_adds_nothing_to_the_sound(form: str) -> None:
    plain, other = (sound.Encoder(form, RATE, whole=True) for _ in range(2))
    silent = np.zeros(0, np.float32)
    for samples in (silent, TONE, silent):
        plain.add(samples)
    other.add(TONE)
    assert len(plain.end()) == len(other.end())


@pytest.mark.spec("H4")
@pytest.mark.parametrize("form", sound.WRITTEN)
@pytest.mark.parametrize("count", [0, 1])
def test_sound_with_hardly_a_sample_is_a_file_of_silence(form: str, count: int) -> None:
    encoder = sound.Encoder(form, RATE, whole=form in sound.KNOW_THEIR_LENGTH)
    raw = encoder.add(np.zeros(count, np.float32)) + encoder.end()
    if form == "pcm":
        heard_s = len(raw) / 2 / 24_000
    else:
        heard_s = len(sound.decode(raw, most_s=1)) / sound.HEARD_HZ
    assert sound.LEAST_S <= heard_s < sound.LEAST_S + 0.05


def test_loud_sound_is_cut_and_does_not_wrap_around() -> None:
    encoder = sound.Encoder("wav", 16_000, whole=True)
    encoder.add(np.full(16_000, 2.0, np.float32))
    assert sound.floats(sound.decode(encoder.end(), most_s=2)).min() > 0.9


@pytest.mark.spec("L2", "L3")
def test_declared_duration_is_refused_before_anything_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sound, "_frames", None)  # whose call would fail
    with pytest.raises(sound.BadSound, match="declares 10 s; at most 5 s"):
        sound.decode(bytes(wav(10)), most_s=5)
    huge = bytearray(encoded("flac", whole=True))
    assert huge[:4] == b"fLaC"
    packed = int.from_bytes(huge[18:26], "big")  # rate, channels, bits, 36 bits of samples
    huge[18:26] = ((packed & ~0xFFFFFFFFF) | (10**10)).to_bytes(8, "big")
    with pytest.raises(sound.BadSound, match="declares 453515 s"):
        sound.decode(bytes(huge), most_s=3_600)


@pytest.mark.spec("L2", "L3")
def test_sound_longer_than_declared_is_refused_while_it_is_decoded() -> None:
    """Silence packs a thousandfold, and a stream's header says no length."""
    encoder = sound.Encoder("flac", 8_000)
    minute = np.zeros(60 * 8_000, np.float32)
    raw = b"".join([encoder.add(minute) for _ in range(20)] + [encoder.end()])
    assert len(raw) < 300_000
    with pytest.raises(sound.BadSound, match="longer than 60 s"):
        sound.decode(raw, most_s=60)


@pytest.mark.spec("L2", "L3")
def test_rates_and_channels_that_no_speech_has_are_refused() -> None:
    slow = wav(0.001, 16_000)
    slow[24:28] = struct.pack("<I", 1)
    with pytest.raises(sound.BadSound, match="of 1 Hz"):
        sound.decode(bytes(slow), most_s=3_600)
    with pytest.raises(sound.BadSound, match=r"no sound|channels"):
        sound.decode(bytes(wav(1, channels=100)), most_s=60)


@pytest.mark.spec("L3")
@pytest.mark.parametrize("raw", [b"", b"x" * 10_000, b"\x89PNG\r\n\x1a\n" + b"\0" * 100])
def test_bytes_that_are_no_sound_are_refused_by_field(raw: bytes) -> None:
    with pytest.raises(sound.BadSound) as caught:
        sound.decode(raw, most_s=60)
    assert (caught.value.status_code, caught.value.param) == (400, "file")


@pytest.mark.spec("L3")
def test_sound_of_no_length_is_refused() -> None:
    with pytest.raises(sound.BadSound, match=r"it takes 0\.1 s"):
        sound.decode(bytes(wav(0.05)), most_s=60)


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize("kind", archives.KINDS)
def test_archive_is_no_sound_and_is_not_unpacked(kind: str) -> None:
    raw = archives.archive(kind)
    with archives.growth() as grown, pytest.raises(sound.BadSound, match=r"no sound|compressed"):
        sound.decode(raw, most_s=60)
    assert grown() < archives.MOST_GROWN_BYTES


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    ("made", "most_bytes"),
    [
        (lambda: films.mp4(4_000_000, 1, 2), archives.MOST_GROWN_BYTES),
        (lambda: films.mp4(690_000, 1, 2, tracks=20), 256 * MIB),
        (lambda: films.matroska(40, 5_000_000), 400 * MIB),
    ],
    ids=["samples", "samples of many tracks", "compressed headers"],
)
def test_header_that_declares_much_in_a_few_bytes_takes_bounded_memory(
    made: Callable[[], bytes], most_bytes: int
) -> None:
    raw = made()
    assert len(raw) < 300_000
    with archives.growth() as grown, contextlib.suppress(sound.BadSound):
        sound.decode(raw, most_s=1_800)
    assert grown() < most_bytes


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (films.mp4(50, 160, 160, tracks=9), "more than 8 streams, or a header above 17 MiB"),
        (films.mp4(4_000_000, 1, 2), r"0\.000 s of sound"),
    ],
)
def test_film_of_too_many_streams_or_samples_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(sound.BadSound, match=why):
        sound.decode(raw, most_s=1_800)


@pytest.mark.spec("L2")
@pytest.mark.parametrize(("edits", "plays"), [(1, 1), (2, 2), (200, 1)])
def test_film_is_heard_as_it_was_cut_unless_its_edits_are_very_many(edits: int, plays: int) -> None:
    samples = sound.decode(films.mp4(50, 160, 160, edits=edits), most_s=1_800)
    assert len(samples) / sound.HEARD_HZ == pytest.approx(plays, abs=0.01)


def packets(raw: Iterator[bytes], codec: str, rate: int, count: int) -> bytes:
    """A Matroska file of packets that have `count` samples each."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="matroska") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        container.start_encoding()
        for number, one in enumerate(raw):
            packet = av.Packet(one)
            packet.stream, packet.time_base = stream, Fraction(1, rate)
            packet.pts = packet.dts = number * count
            container.mux(packet)
    return sink.getvalue()


@pytest.mark.spec("L2", "L3")
def test_packets_with_hardly_a_sample_are_refused_after_some_of_them() -> None:
    def file(tiny_count: int) -> bytes:
        second = [bytes(192)] * 1_000
        return packets(iter([*second, *[b"\1\0"] * tiny_count]), "pcm_s16le", 96_000, 96)

    assert len(sound.decode(file(sound.SPARE_PACKETS // 2), 60)) > sound.HEARD_HZ
    with pytest.raises(sound.BadSound, match="more than 2000 packets in a second"):
        sound.decode(file(sound.SPARE_PACKETS * 2), 60)


def frames_of(form: str) -> list[bytes]:
    with av.open(io.BytesIO(encoded(form))) as container:
        return [bytes(packet) for packet in container.demux(audio=0) if packet.size]


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    ("codec", "form", "count", "why"),
    [
        ("flac", "flac", 100, "a packet of more than 12 frames"),
        ("flac", "flac", 2_000, "a packet of [0-9]+ bytes of flac is not read; at most 524288"),
        ("aac", "aac", 2_000, "a packet of [0-9]+ bytes of aac is not read; at most 32768"),
    ],
)
def test_packet_of_very_many_frames_is_refused_before_it_is_decoded(
    codec: str, form: str, count: int, why: str
) -> None:
    frame = frames_of(form)[-2]
    raw = packets(iter([frame, frame * count, frame]), codec, RATE, 1_000)
    with archives.growth() as grown, pytest.raises(sound.BadSound, match=why):
        sound.decode(raw, 60)
    assert grown() < 16 * MIB


@pytest.mark.spec("H3")
def test_sound_behind_a_broken_frame_is_heard() -> None:
    whole = frames_of("flac")
    assert len(whole) > 10
    whole[2] = bytes(len(whole[2]))
    raw = packets(iter(whole), "flac", RATE, 4_608)
    assert len(sound.decode(raw, 60)) / sound.HEARD_HZ == pytest.approx(3, abs=0.25)


def in_a_wav() -> bytes:
    chunk = b"id3 " + struct.pack("<I", len(archives.tag())) + archives.tag()
    whole = bytes(wav(3))
    return whole[:12] + chunk + b"\0" * (len(chunk) % 2) + whole[12:]


def between_frames() -> bytes:
    whole = encoded("aac")
    second = whole.index(whole[:2], 100)
    return whole[:second] + archives.tag() + whole[second:]


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    "made",
    [lambda: archives.tag() + encoded("mp3"), in_a_wav, between_frames],
    ids=["in front", "in a WAV", "between frames"],
)
def test_tag_that_unpacks_to_much_is_not_unpacked_and_the_sound_is_heard(
    made: Callable[[], bytes],
) -> None:
    raw = made()
    with archives.growth() as grown:
        samples = sound.decode(raw, most_s=60)
    assert grown() < archives.MOST_GROWN_BYTES
    assert len(samples) / sound.HEARD_HZ == pytest.approx(3, abs=0.1)


@pytest.mark.spec("L2")
def test_tags_in_front_are_cut_off_up_to_a_bound_and_not_unpacked_beyond_it() -> None:
    raw = archives.tag() * (sound.MOST_TAGS + 2) + encoded("mp3")
    with archives.growth() as grown, contextlib.suppress(sound.BadSound):
        sound.decode(raw, most_s=60)
    assert grown() < archives.MOST_GROWN_BYTES


def test_tags_that_people_have_change_nothing_that_is_heard() -> None:
    tagged = encoded("mp3")
    assert tagged.startswith(b"ID3")
    bare = tagged[tagged.index(b"\xff\xfb") :]
    assert np.array_equal(sound.decode(tagged, 60), sound.decode(bare, 60))


@pytest.mark.spec("L2")
def test_picture_in_a_container_of_sound_is_not_heard() -> None:
    sink = io.BytesIO()
    with av.open(sink, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuvj420p"
        for packet in stream.encode(av.VideoFrame(16, 16, "yuvj420p")):
            container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    with pytest.raises(sound.BadSound, match="has no sound"):
        sound.decode(sink.getvalue(), most_s=60)
