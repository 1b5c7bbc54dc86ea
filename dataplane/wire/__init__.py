"""Messages and frames: the only place that encodes or decodes what travels."""
