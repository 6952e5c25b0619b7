"""Projected pictures, kept between requests: vLLM's encoder cache with a bound, a term and counts.

vLLM asks the manager before it runs the encoder, so a hit costs no encoder work. Its own manager
keeps entries until their place is needed; this one keeps the last `entries`, and none that was not
used for `term_s`. The worker drops what left with the next step; a cache that becomes empty while
nothing runs is cleared at once (`ForkedCore.expire_pictures`).
"""

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

ENTRIES, TERM_S = 32, 300.0
MANAGER = "deployments.engines.vllm.picture_cache.PictureCache"


class PictureCache(EncoderCacheManager):
    """Given to vLLM as `encoder_cache_manager_cls`; `manager_config` may have `entries`, `term_s`.

    An entry is in use by the requests that read it, or `freeable`. Only freeable entries leave, the
    one unused for longest first, so more than `entries` may be there while they are all in use.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> "PictureCache":
        made = cls(cache_size)
        given = vllm_config.ec_manager_config.manager_config
        made.entries = int(given.get("entries", ENTRIES))
        made.term_s = float(given.get("term_s", TERM_S))
        return made

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.entries, self.term_s = ENTRIES, TERM_S
        self.hits = self.misses = self.dropped = 0
        self.used_s: dict[str, float] = {}  # when an entry was last needed

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """A request is counted once for each of its pictures, however many steps ask again."""
        self.expire()
        known = input_id in self.request_cached_ids.get(request.request_id, ())
        is_there: bool = super().check_and_update_cache(request, input_id)
        if is_there:
            self.used_s[request.mm_features[input_id].identifier] = self.clock()
            self.hits += not known
        return is_there

    def allocate(self, request: Request, input_id: int) -> None:
        super().allocate(request, input_id)
        self.misses += 1
        self.used_s[request.mm_features[input_id].identifier] = self.clock()
        self._bound()

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        super().free_encoder_input(request, input_id)
        self._bound()

    def can_allocate(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM makes room here where the embeddings, not the entries, are too many."""
        before = len(self.freed)
        can: bool = super().can_allocate(*args, **kwargs)
        self._forget(self.freed[before:])
        return can

    def reset(self) -> None:
        self.dropped += len(self.cached)
        super().reset()
        self.used_s.clear()

    def expire(self) -> None:
        """Drops what was not used for the term."""
        end_s = self.clock() - self.term_s
        for key in [key for key in self.freeable if self.used_s[key] <= end_s]:
            self._drop(key)

    def purge(self) -> None:
        """Drops all that no request reads."""
        for key in list(self.freeable):
            self._drop(key)

    def _bound(self) -> None:
        while len(self.cached) > self.entries and self.freeable:
            self._drop(next(iter(self.freeable)))

    def _drop(self, key: str) -> None:
        self.num_free_slots += self.freeable.pop(key)
        del self.cached[key]
        del self.num_embeds_by_hash[key]
        self.freed.append(key)
        self._forget([key])

    def _forget(self, keys: list[str]) -> None:
        self.dropped += len(keys)
        for key in keys:
            self.used_s.pop(key, None)

    def facts(self) -> dict[str, int]:
        """`embeddings` of the most that vLLM keeps, `most_embeddings`."""
        return {
            "entries": len(self.cached),
            "most_entries": self.entries,
            "hits": self.hits,
            "misses": self.misses,
            "dropped": self.dropped,
            "embeddings": sum(self.num_embeds_by_hash.values()),
            "most_embeddings": self.cache_size,
        }
