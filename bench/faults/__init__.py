"""`python -m bench faults`: damage to a plane of three peers, and what became of its promises."""
