"""Slabs as KV blocks, pictures and adapter images use them: held open, mapped and grown."""
