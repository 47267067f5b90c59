"""HTTP in, HTTP out: the request path around the engine."""
