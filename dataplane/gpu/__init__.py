"""Memory of GPUs: what a device must do, CUDA, and which other kinds are installed."""
