"""Text, vision and pooling models through vLLM: the engine, and its parts by subject in folders."""
