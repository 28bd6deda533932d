"""WORKER PROCESS: the loop, the messages and their legal order, the shared arrays.

A worker imports `asyncmaml.worker` and `asyncmaml.envs` and nothing else of ours: no torch, no
asyncio, not the user's script.
"""
