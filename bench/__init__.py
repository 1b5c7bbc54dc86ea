"""A benchmark for data planes that move rows between the stages of RL post-training. It runs
without dataplane."""
