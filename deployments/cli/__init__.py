"""The `arbiter` command; a folder for each group of `arbiter --help`, put together by `main`."""
