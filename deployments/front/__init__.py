"""The HTTP front: every API's routes, keys, health, and a window on the arbiter."""
