"""What others read of the core: snapshot, explanations, replica targets."""
