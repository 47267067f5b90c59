"""One file per architecture, found by its name."""
