"""A client's side of GPU memory: the device arenas that it opened, and columns that lie there.

The client loads this by name, through `dataplane.gpu.registry`, and only if it needs it.

| idea | file |
|---|---|
| the device arenas of one session | pools |
| puts of values on a device | puts |
| columns on a device, and tensors on a GPU | columns |
"""
