"""The HTTP front: OpenAI's routes, health, and a window on the arbiter."""
