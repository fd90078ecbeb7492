"""Configuration lint: target and drafter folders and the serve flags against an install, without a GPU."""
