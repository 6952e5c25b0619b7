"""One file per capability: the deployments that answer requests."""
