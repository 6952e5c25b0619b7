"""LoRA adapters: from the name in a request to a slot, their warm images, and their kernels."""
