"""Engine processes: the zygote, its children, and one file per engine library."""
