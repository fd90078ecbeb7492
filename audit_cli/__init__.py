"""The command line: targets, transports, the snapshot of an install, and the launching of runs."""

__version__ = "0.1.0"
