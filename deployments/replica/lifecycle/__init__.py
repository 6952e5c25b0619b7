"""The steps of a held model's life: it loads, is watched, changes its size, and leaves."""
