"""Retraining a DFlash drafter for one target: prompts in, a checkpoint out, acceptance measured at every step.

``python -m ddtree.training plan | curate | generate | train | eval | export | smoke``
"""
