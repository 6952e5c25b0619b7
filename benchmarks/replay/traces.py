"""Arrivals from public traces (benchmarks.md names sources and licences), or drawn where they are
absent. The files stay outside the repository: `--traces DIR` or $ARBITER_TRACES.

Every trace is (second, client) pairs in order of time. The traces come from services thousands of
times larger than one machine, so they are thinned or stretched to a rate at which one machine with
a load of seconds is neither idle nor unplaceable; who asks when, relative to others, is kept.
"""

import csv
import gzip
import itertools
import json
import os
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

Arrival = tuple[float, int]  # seconds since the start, client
WINDOW_S = 600.0  # of ServeGen's rates
CLIENTS_COUNT = 87  # base models of the text-to-image service whose skew is used
TOP_COUNT, TOP_FRACTION = 5, 0.7  # there, the five most used take 70 % of requests


class TracesAbsent(Exception):
    def __str__(self) -> str:
        return "no traces: give --traces DIR or set $ARBITER_TRACES; --synthetic draws some"


def folder(given: str | None) -> Path:
    """Raises TracesAbsent."""
    path = given or os.environ.get("ARBITER_TRACES")
    if not path or not Path(path).is_dir():
        raise TracesAbsent
    return Path(path)


# -- ServeGen: 14 days of rates per client --------------------------------------------------------


def servegen(path: Path, requests_count: int, seed: int) -> list[Arrival]:
    """Each client's rate and variation in each 600 s window, thinned to about `requests_count` in
    all. Thinning a renewal process by p leaves a squared variation of p cv^2 + 1 - p."""
    windows: dict[int, list[tuple[float, float, float]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            window = float(row["window_start_s"]), float(row["rate_per_s"]), float(row["cv"])
            windows.setdefault(int(row["client"]), []).append(window)
    total = sum(rate * WINDOW_S for client in windows.values() for _, rate, _ in client)
    return thinned(windows, requests_count / total, seed)


def thinned(
    windows: dict[int, list[tuple[float, float, float]]], keep_fraction: float, seed: int
) -> list[Arrival]:
    """Arrivals drawn from (start, rate per second, variation) windows per client."""
    drawn: list[Arrival] = []
    for client, its in sorted(windows.items()):
        rng = random.Random(f"{seed}/{client}")
        times = _renewals(sorted(its), keep_fraction, rng)
        drawn += [(at, client) for at in times]
    return sorted(drawn)


def _renewals(
    windows: list[tuple[float, float, float]], keep_fraction: float, rng: random.Random
) -> Iterator[float]:
    """Gamma gaps in operational time, so that a gap may span windows of different rates."""
    left: float | None = None
    for start, full_rate, cv in windows:
        rate, now = full_rate * keep_fraction, 0.0
        shape = 1 / (keep_fraction * cv * cv + 1 - keep_fraction)
        if left is None:
            left = rng.gammavariate(shape, 1 / shape) * rng.random()
        while rate > 0 and now + left / rate <= WINDOW_S:
            now += left / rate
            yield start + now
            left = rng.gammavariate(shape, 1 / shape)
        left -= (WINDOW_S - now) * rate


# -- Azure and Mooncake: when requests came, not for which model ----------------------------------


def azure(path: Path, stretch: float, seed: int) -> list[Arrival]:
    """One hour of arrivals, stretched; each asks a model drawn with the skew above."""
    with gzip.open(path, "rt") as file:
        stamps = [datetime.fromisoformat(r["TIMESTAMP"][:26]) for r in csv.DictReader(file)]
    rng = random.Random(seed)
    clients = rng.choices(range(CLIENTS_COUNT), skew(), k=len(stamps))
    start = min(stamps)
    return sorted(
        ((at - start).total_seconds() * stretch, client)
        for at, client in zip(stamps, clients, strict=True)
    )


def mooncake(path: Path, stretch: float, seed: int) -> list[Arrival]:
    """One hour of conversations, stretched. Requests that share their second block of 512 tokens
    belong together and ask the same model, drawn with the skew above."""
    rng, models, weights = random.Random(seed), {}, skew()
    arrivals: list[Arrival] = []
    with gzip.open(path, "rt") as file:
        for line in file:
            asked = json.loads(line)
            blocks = asked["hash_ids"]
            talk = blocks[min(1, len(blocks) - 1)]
            if talk not in models:
                [models[talk]] = rng.choices(range(CLIENTS_COUNT), weights)
            arrivals.append((asked["timestamp"] / 1e3 * stretch, models[talk]))
    return sorted(arrivals)


def skew() -> list[float]:
    """Zipf weights under which the top five of 87 take 70 %: the exponent by bisection."""
    low, high = 0.5, 3.0
    for _ in range(40):  # 2.5 / 2^40 is below a double's grain here
        middle = (low + high) / 2
        weights = [(rank + 1) ** -middle for rank in range(CLIENTS_COUNT)]
        is_flat = sum(weights[:TOP_COUNT]) < TOP_FRACTION * sum(weights)
        low, high = (middle, high) if is_flat else (low, middle)
    return weights


# -- objects of caches, in place of models -------------------------------------------------------


def objects(path: Path) -> list[Arrival]:
    """Returns the requests that benchmarks.replay.prepare wrote."""
    with gzip.open(path, "rt") as file:
        return [(float(at), int(client)) for at, client in csv.reader(file)]


# -- where no trace is at hand --------------------------------------------------------------------


def synthetic(requests_count: int, seed: int, clients_count: int = 24) -> list[Arrival]:
    """Two days of clients that resemble ServeGen's: rates over three decades, a daily swing with
    its own phase, and hours in which a client is away."""
    rng = random.Random(seed)
    day_s = 86_400.0
    windows: dict[int, list[tuple[float, float, float]]] = {}
    for client in range(clients_count):
        rate, phase, away = 10 ** rng.uniform(-1.5, 1.5), rng.random(), rng.uniform(0, 0.6)
        is_there = rng.random() >= away
        for start in itertools.takewhile(lambda t: t < 2 * day_s, itertools.count(0.0, WINDOW_S)):
            if rng.random() < 1 / 12:  # it changes its state every two hours
                is_there = rng.random() >= away
            swing = 1 + 0.8 * _triangle(start / day_s + phase)
            if is_there:
                windows.setdefault(client, []).append((start, rate * swing, 2.0))
    total = sum(rate * WINDOW_S for its in windows.values() for _, rate, _ in its)
    return thinned(windows, requests_count / total, seed)


def _triangle(turns: float) -> float:
    """-1 to 1 and back, once a turn."""
    return 4 * abs(turns % 1 - 0.5) - 1
