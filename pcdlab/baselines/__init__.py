"""The usual ways to get the same object, to compare with."""
