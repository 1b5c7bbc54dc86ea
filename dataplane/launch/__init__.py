"""How a process finds, names, configures and starts the peer of its host. No sockets of the data
plane are opened here, apart from asking whether a peer answers."""
