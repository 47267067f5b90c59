"""Every Op's signature and its implementations."""
