"""What workers and learner have in common: the contracts, and the adapters to broker and bucket."""
