"""What runs on each node: keeps the zygote alive, opens engines, measures them, kills them."""
