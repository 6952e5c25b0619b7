"""The arbiter's own process: the actor, its shell around the core, what it stores."""
