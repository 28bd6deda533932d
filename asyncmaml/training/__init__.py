"""What `trainer.py` and `evaluation.py` are made of; runs in the caller's event loop.

The learner's work is done in one thread beside it (`learner_thread.py`), the sampler's in its own.
"""
