"""The front's routes, one subject a module."""
