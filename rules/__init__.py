"""Static rules: facts from Python's own ``ast`` over every file, then libcst on the few files that matter."""
