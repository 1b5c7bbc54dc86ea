"""Messages and frames. Only this package encodes and decodes them."""
