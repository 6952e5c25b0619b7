"""Work that outlives its client: Files, Batches, and jobs, kept in the state file and a folder."""
