"""What a peer says of itself, and what it does by the clock."""
