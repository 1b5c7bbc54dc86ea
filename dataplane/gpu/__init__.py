"""Memory of GPUs: the seam to a driver, and the books and copies that only devices need.

| idea | file |
|---|---|
| what a device must do; CUDA; which kinds are installed | device, cuda, registry |
| a host's memory with device arenas, in the peer | host_memory |
| copies from the page-locked arena to a GPU, in a client | direct |
"""
