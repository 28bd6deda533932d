"""SAMPLER THREAD: coordinator, process pool, action batching, device executor.

Everything here but `AsyncSampler`'s own methods and `BatchSampler` runs in the sampler's thread,
between the awaits of its event loop. It knows nothing of `asyncmaml.learning`.
"""
