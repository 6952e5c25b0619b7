"""vLLM's workers with a sleep that gives memory back, and the drafter that leaves them."""
