"""Ollama's HTTP API over the front's own routes. Source: docs.ollama.com/api."""
