"""The embedded models and what makes them."""
