"""LoRA adapters: catalogue, fetching, checking; used by front, replica and engine."""
