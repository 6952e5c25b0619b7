"""What this engine serves beside vLLM's own routes, and what it adds to their answers."""
