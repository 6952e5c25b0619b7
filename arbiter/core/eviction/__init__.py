"""Which models may be evicted, which are chosen, and what pressure evicts."""
