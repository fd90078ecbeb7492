"""The command line: targets, transports, the snapshot of an install, and the launching of runs."""
