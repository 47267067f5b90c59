"""Clock, ledger, metrics, logs."""
