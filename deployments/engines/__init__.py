"""Engine processes: the zygote, its children, and a file or folder for each engine library."""
