"""Other peers: links and calls to them, and what they ask in turn; who can be reached, who is let
in."""
