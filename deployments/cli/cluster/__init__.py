"""From a configuration to a graph that serves, and to its end."""
