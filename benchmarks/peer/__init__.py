"""One runner script per peer: JSON lines in, seconds out. The peer itself runs it: it imports no headway."""
