"""One file per checkpoint format."""
