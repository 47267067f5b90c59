"""Scripts that print a table with machine, commit, command and spread."""
