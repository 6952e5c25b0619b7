"""Which replica serves a request."""
