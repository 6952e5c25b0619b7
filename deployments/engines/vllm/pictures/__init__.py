"""Pictures in chats: the identity by which vLLM caches them, and the encoder's output in a slab."""
