"""DDTree over a DFlash drafter: the engine that runs on the GPU host."""
