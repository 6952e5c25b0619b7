"""diffusers: pictures from text and from pictures; engine, batches, pipeline, uploads."""
