"""Whether log and streams are what they should be: read-only."""
