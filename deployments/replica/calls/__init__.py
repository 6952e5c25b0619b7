"""What a call meets in its replica: progress, its deadline, batched pieces, sessions, acquires."""
