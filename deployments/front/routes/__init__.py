"""The front's routes beside OpenAI's, one subject a module."""
