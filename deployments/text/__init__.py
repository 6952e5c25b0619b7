"""Text: chat and completions on vLLM."""
