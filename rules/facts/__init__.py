"""Stage 1: what every file of an install is asked, by Python's own ``ast``."""
