"""Several hosts on one machine: network namespaces joined by a bridge, with links that can be cut.

Unlike the loopback addresses of the tests, hosts here have addresses and interfaces of their own,
every byte between them crosses a link, and peers need a cluster token. `python -m deploy.testbed`.
"""
