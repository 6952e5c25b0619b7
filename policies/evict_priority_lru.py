"""Idle before busy, the least urgent, the role worth least, then the least recently used."""

from arbiter.view import Candidate, Key


def key(c: Candidate) -> Key:
    return (c.inflight > 0, -c.priority, c.role_rank, c.last_used, c.ticket)
