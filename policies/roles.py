"""What each kind of work is worth (C1) and how long it stays warm unused (C8).

A new role is one line. Rank: lowest is evicted first.
"""

from arbiter.core.view import Role

ROLES: dict[str, Role] = {
    "lease": Role(5, "an outside process is asked to end", keep_warm_s=300),
    # Served by itself; beside its target a drafter is a part of the target's ticket.
    "drafter": Role(10, "the next draft waits for a load", keep_warm_s=300),
    "emotion": Role(15, "its labels are missing until it is back", keep_warm_s=300),
    "speaker-id": Role(18, "its labels are missing until it is back", keep_warm_s=300),
    "vision": Role(20, "drops its cache of image embeddings", keep_warm_s=60),
    "image": Role(20, "the next picture waits for a load", keep_warm_s=900),
    "embedding": Role(25, "the next batch waits for a load", keep_warm_s=300),
    "turn-detector": Role(28, "may drop its pages instead of its process", keep_warm_s=300),
    "wake-word": Role(30, "may drop its pages instead of its process", keep_warm_s=300),
    "vad": Role(35, "may drop its pages instead of its process", keep_warm_s=300),
    "asr": Role(40, "speech waits for a load", keep_warm_s=300),
    "tts": Role(50, "answers wait for a voice", keep_warm_s=300),
    "text": Role(
        100, "drops its KV cache; every conversation waits", keep_warm_s=300, is_spared=True
    ),
}
