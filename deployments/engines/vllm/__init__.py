"""vLLM: engine, engine core process, adapters, batch admission, and the CPU worker."""
