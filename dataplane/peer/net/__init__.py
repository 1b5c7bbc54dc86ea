"""Other peers: links and calls to them, their requests, and which peers are admitted."""
