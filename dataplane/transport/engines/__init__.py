"""Transports over libraries for RDMA and GPUs. A bulk worker imports only the one that it runs."""
