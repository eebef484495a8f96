"""The learner: groups in, policy versions out, every task settled exactly once."""
