"""Readable torch implementations of every raw operator: slow, any floating dtype, the oracle of the tests."""
