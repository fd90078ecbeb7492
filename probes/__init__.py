"""Scripts run by the host's own Python; each is shipped alone and imports nothing of ours."""
