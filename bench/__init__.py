"""A bench for what moves rows between the stages of RL post-training. Runs alone."""
