"""KV blocks that outlive their engine: how they enter a slab, return, and are reported."""
