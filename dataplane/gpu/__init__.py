"""GPU memory: the interface of a device, and the accounting and copies that only devices need.

| idea | file |
|---|---|
| interface of a device; CUDA; what is loaded by name | device, cuda, registry |
| memory of a host with device arenas, in the peer | host_memory |
| the devices that torch knows | torch_devices |
| copies from the page-locked arena to a GPU, in a client | direct |
| device arenas that a client opened, and columns there | client |
| device arenas of a peer, and pulls between them | peer |
"""
