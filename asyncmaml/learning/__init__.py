"""What runs in the learner's thread: torch only, tensors in, tensors out.

No processes and no asyncio in here, and nothing of `asyncmaml.sampling`.
"""
