"""Transports over libraries for RDMA and GPUs. A bulk worker imports the one that it runs."""
