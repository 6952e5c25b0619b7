"""Films with sound, whose headers declare much in a few bytes."""

import struct
import zlib

ALAW_HZ = 8_000
_MATRIX = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def _full(kind: bytes, *parts: bytes, flags: int = 0) -> bytes:
    return _box(kind, struct.pack(">I", flags), *parts)


def mp4(count: int, sample_bytes: int, duration: int, *, tracks: int = 1, edits: int = 0) -> bytes:
    """A film with `count` samples of A-law of `sample_bytes` bytes each. `edits`: how often its
    list of edits has all of it played."""
    heads = [_track(n + 1, count, sample_bytes, duration, edits) for n in range(tracks)]
    times = struct.pack(">IIII", 0, 0, 1_000, 1_000)
    film = _full(b"mvhd", times, struct.pack(">IH", 0x10000, 0x100), bytes(10), _MATRIX, bytes(28))
    sound = bytes(range(256)) * 40
    ftyp = _box(b"ftyp", b"isom", bytes(4), b"isom")
    return ftyp + _box(b"mdat", sound) + _box(b"moov", film, *heads)


def _track(number: int, count: int, sample_bytes: int, duration: int, edits: int) -> bytes:
    sound = struct.pack(">HHHHI", 1, 16, 0, 0, ALAW_HZ << 16)
    tables = (
        _full(b"stsd", struct.pack(">I", 1), _box(b"alaw", bytes(6), b"\0\1", bytes(8), sound)),
        _full(b"stts", struct.pack(">III", 1, count, duration)),
        _full(b"stsc", struct.pack(">IIII", 1, 1, count, 1)),
        _full(b"stsz", struct.pack(">II", sample_bytes, count)),
        _full(b"stco", struct.pack(">II", 1, 28)),
    )
    reference = _box(b"dinf", _full(b"dref", struct.pack(">I", 1), _full(b"url ", flags=1)))
    media = _box(
        b"mdia",
        _full(b"mdhd", struct.pack(">IIIII", 0, 0, ALAW_HZ, ALAW_HZ, 0x55C40000)),
        _full(b"hdlr", bytes(4), b"soun", bytes(13)),
        _box(b"minf", _full(b"smhd", bytes(4)), reference, _box(b"stbl", *tables)),
    )
    played = struct.pack(">IIHH", count * duration * 1_000 // ALAW_HZ, 0, 1, 0) * edits
    plays = _box(b"edts", _full(b"elst", struct.pack(">I", edits), played)) if edits else b""
    head = struct.pack(">IIIII", 0, 0, number, 0, 0) + bytes(16) + _MATRIX + bytes(8)
    return _box(b"trak", _full(b"tkhd", head, flags=3), plays, media)


def _element(number: int, *parts: bytes) -> bytes:
    """Of EBML."""
    body = b"".join(parts)
    return number.to_bytes(-(-number.bit_length() // 8), "big") + (
        struct.pack(">Q", len(body) | 1 << 56) + body
    )


def _number(number: int, value: int) -> bytes:
    return _element(number, struct.pack(">H", value))


def matroska(tracks: int, header_bytes: int) -> bytes:
    """A film, each of whose tracks has a header of so many bytes, compressed."""
    compressed = _element(
        0x6D80,
        _element(
            0x6240,
            _number(0x5031, 0),  # the first encoding
            _number(0x5032, 2),  # of the header
            _number(0x5033, 0),  # is a compression,
            _element(0x5034, _number(0x4254, 0)),  # by zlib
        ),
    )
    packed = zlib.compress(bytes(header_bytes))
    sound = _element(
        0xE1, _element(0xB5, struct.pack(">d", 16_000.0)), _number(0x9F, 1), _number(0x6264, 16)
    )
    heads = [
        _element(
            0xAE,
            _number(0xD7, n),
            _number(0x73C5, n),
            _number(0x83, 2),
            _element(0x86, b"A_PCM/INT/LIT"),
            _element(0x63A2, packed),
            sound,
            compressed,
        )
        for n in range(1, tracks + 1)
    ]
    return _element(0x1A45DFA3, _element(0x4282, b"matroska")) + _element(
        0x18538067,
        _element(0x1549A966, _number(0x2AD7B1, 1_000)),
        _element(0x1654AE6B, *heads),
        _element(0x1F43B675, _number(0xE7, 0), _element(0xA3, b"\x81\0\0\x80", bytes(16_000))),
    )
