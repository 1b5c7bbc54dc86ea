"""How a process finds, names, configures and starts the peer of its host. It opens no
connections, except to check whether a peer answers."""
