"""What crosses processes: messages, RPC, JSON, and Ray's semi-private calls."""
