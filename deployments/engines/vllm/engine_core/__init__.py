"""The process of vLLM's engine core: how it is forked, watched, and connected to."""
