"""A request from its body to its answer: parsed, checked, sent to a capability, and relayed."""
