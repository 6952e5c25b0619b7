"""The `arbiter` command, one module per subject; `main` puts them together."""
