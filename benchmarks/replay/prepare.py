"""Makes trace files for benchmarks.replay out of clones of public repositories.

    python -m benchmarks.replay.prepare --to DIR --servegen CLONE --caffeine CLONE --college CLONE \
        --emaileu CLONE

A clone may be bare: files are read with `git show`. ServeGen's clients become rates by window as in
the files that are shipped beside it. Of the traces of caffeine's simulator, whose objects play the
models, the 200 most asked for are kept, one request every 20 s, because those files have no times.
Of the messages among students and the mail of an institution that Stanford's SNAP publishes, of
which others keep copies (CollegeMsg, email-Eu), the senders play the models, at their own times.
"""

import argparse
import csv
import gzip
import io
import lzma
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SERVEGEN = {
    "large": "data/language/m-large",
    "r1": "data/reason/deepseek-r1",
    "image": "data/multimodal/mm-image",
}
PARSERS = "simulator/src/main/resources/com/github/benmanes/caffeine/cache/simulator/parser"
LIRS = ("2_pools", "cpp", "cs", "gli", "multi1", "multi2", "multi3", "ps", "sprite")
CACHE2K = ("web07", "web12", "orm-busy")
MESSAGES = {"college": "CollegeMsg.txt", "emaileu": "email-Eu-core-temporal.txt"}
OBJECTS_COUNT, EVERY_S = 200, 20


class Clone:
    """A repository on this machine."""

    def __init__(self, path: str) -> None:
        self.path = path

    def files(self, folder: str) -> list[str]:
        """Returns the paths of all files in a folder."""
        listed = self._git("ls-tree", "-r", "--name-only", "HEAD", folder)
        return listed.decode().splitlines()

    def read(self, path: str) -> bytes:
        """Returns a file's bytes."""
        return self._git("show", f"HEAD:{path}")

    def _git(self, *args: str) -> bytes:
        done = subprocess.run(["git", "-C", self.path, *args], check=True, stdout=subprocess.PIPE)
        return done.stdout


def write_servegen(clone: Clone, name: str, to: Path) -> None:
    """Writes client, window, rate and variation of a category's clients."""
    path = to / f"servegen_m-{name}_rates.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        table = csv.writer(file)
        table.writerow(("client", "window_start_s", "rate_per_s", "cv"))
        for chunk in clone.files(SERVEGEN[name]):
            if client := re.search(r"chunk-(\d+)-trace\.csv$", chunk):
                for row in csv.reader(io.StringIO(clone.read(chunk).decode())):
                    if float(row[1]) > 0:
                        table.writerow((client[1], row[0], row[1], row[2] or 1))


def write_objects(objects: list[object], name: str, to: Path, most_count: int) -> None:
    """Writes second and object of the first requests for the objects most asked for."""
    kept = _most_asked([(0, key) for key in objects])[:most_count]
    _write([(n * EVERY_S, client) for n, (_, client) in enumerate(kept)], name, to)


def write_messages(clone: Clone, path: str, name: str, to: Path, most_count: int) -> None:
    """Writes second and sender of the first messages of the senders who send most."""
    lines = [line.split() for line in clone.read(path).decode().splitlines()]
    sent = sorted((int(line[2]), int(line[0])) for line in lines if line[2].isdigit())
    kept = _most_asked(sent)[:most_count]
    _write([(at - kept[0][0], client) for at, client in kept], name, to)


def _most_asked(requests: Sequence[tuple[int, object]]) -> list[tuple[int, int]]:
    counts = Counter(key for _, key in requests)
    rank = {key: n for n, (key, _) in enumerate(counts.most_common(OBJECTS_COUNT))}
    return [(at, rank[key]) for at, key in requests if key in rank]


def _write(requests: list[tuple[int, int]], name: str, to: Path) -> None:
    with gzip.open(to / f"objects_{name}.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows(requests)


def caffeine(clone: Clone) -> Iterator[tuple[str, list[object]]]:
    """Yields name and requested objects of traces of caffeine's simulator."""
    for name in LIRS:
        lines = gzip.decompress(clone.read(f"{PARSERS}/lirs/{name}.trace.gz")).decode().split()
        yield name, [line for line in lines if line != "*"]
    for name in CACHE2K:
        packed = lzma.decompress(clone.read(f"{PARSERS}/cache2k/{name}.trace.xz"))
        yield name, [key for (key,) in struct.iter_unpack(">i", packed)]
    packed = lzma.decompress(clone.read(f"{PARSERS}/scarab/scarab-recs.trace.xz"))
    yield "scarab", [key for (key,) in struct.iter_unpack(">q", packed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--servegen", help="a clone of alibaba/ServeGen")
    parser.add_argument("--caffeine", help="a clone of ben-manes/caffeine")
    for name, path in MESSAGES.items():
        parser.add_argument(f"--{name}", help=f"a clone with {path}")
    parser.add_argument("--requests", type=int, default=6_000, help="kept of all but ServeGen's")
    args = parser.parse_args()
    for name in SERVEGEN if args.servegen else ():
        write_servegen(Clone(args.servegen), name, args.to)
    for name, objects in caffeine(Clone(args.caffeine)) if args.caffeine else ():
        write_objects(objects, name, args.to, args.requests)
    for name, path in MESSAGES.items():
        if clone := getattr(args, name):
            write_messages(Clone(clone), path, name, args.to, args.requests)


if __name__ == "__main__":
    main()
