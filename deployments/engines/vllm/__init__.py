"""vLLM: engine, engine core process, adapters, admission, and the CPU worker."""
