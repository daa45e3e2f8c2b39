"""The examples of the documentation, executed."""
