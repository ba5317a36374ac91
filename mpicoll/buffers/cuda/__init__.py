"""CUDA devices and their arrays, by cupy. Its modules are imported when the first CUDA array is met."""
