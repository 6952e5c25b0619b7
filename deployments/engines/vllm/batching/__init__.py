"""Which waiting requests enter vLLM's batch next, and which of them its steps leave out."""
