"""Load, measurements, quality, reports."""
