"""Where it fits, the place that leaves the smallest hole; elsewhere the one that lacks least."""

from arbiter.view import Key, Site


def key(s: Site) -> Key:
    left = s.free_bytes - s.need_bytes
    return (left < 0, abs(left), s.device)
