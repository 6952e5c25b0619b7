"""What each kind of work is worth, what evicting it does and costs (C1), and how long it stays warm
unused (C8).

A new role is one line here, or one of the configuration. Rank: the lowest is evicted first. Cost:
the seconds that an eviction loses beside the reload, whose time the arbiter learns for each model.
Each eviction in the event log says what it does (`act`) and how many seconds it costs in all.
"""

from arbiter.core.view import Role

# The pool of a node keeps KV and embeddings of images when their engine goes, so little is lost
# with it: a picture's embeddings take 60 ms from there, where 42 ms do in the engine that made them
# (benchmarks.known_pictures), and blocks of a conversation come back with the prompt that has them.
PICTURE_FROM_POOL_S = 0.02

ROLES: dict[str, Role] = {
    "lease": Role(5, "an outside process is asked to end", keep_warm_s=300),
    # Served by itself; beside its target a drafter is a part of the target's ticket.
    "drafter": Role(10, "the next draft waits for a load", keep_warm_s=300),
    "emotion": Role(15, "its labels are missing until it is back", keep_warm_s=300),
    "speaker-id": Role(18, "its labels are missing until it is back", keep_warm_s=300),
    "vision": Role(
        20,
        "drops its cache of image embeddings, but for what the pool of its node keeps",
        keep_warm_s=60,
        evict_cost_s=PICTURE_FROM_POOL_S,
    ),
    "image": Role(20, "the next picture waits for a load", keep_warm_s=900),
    "embedding": Role(25, "the next batch waits for a load", keep_warm_s=300),
    "turn-detector": Role(28, "may drop its pages instead of its process", keep_warm_s=300),
    "wake-word": Role(30, "may drop its pages instead of its process", keep_warm_s=300),
    "vad": Role(35, "may drop its pages instead of its process", keep_warm_s=300),
    "asr": Role(40, "speech waits for a load", keep_warm_s=300),
    "tts": Role(50, "answers wait for a voice", keep_warm_s=300),
    "text": Role(
        100,
        "drops its KV cache, but for what the pool of its node keeps; every conversation waits",
        keep_warm_s=300,
        is_spared=True,
    ),
}
