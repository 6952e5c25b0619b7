"""The ways past Serve over unix sockets: from proxy to front, and from proxy to engine."""
