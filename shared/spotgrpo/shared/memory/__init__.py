"""The ports in memory, for tests of whole loops."""
