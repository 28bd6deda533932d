"""The random streams of a request's episodes: reset seeds and action noise.

Episode i draws from counter-based streams of its own (Philox 4x64, Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405): the key is made of the sampler's root seed and the
request, the counter of what is drawn, the batch id and the block of steps. So nothing that an
episode draws depends on which row, worker or tick it was run in, nor on the other episodes, and
an episode that is run again draws the same.

The numbers below are part of the promise "same seed, same episodes": change one, and every
seeded result changes.
"""

import copy
import enum

import numpy as np
from numpy.typing import NDArray

_NUMBERS_PER_BLOCK = 512
_MAX_STEPS_PER_BLOCK = 64


def steps_per_block(width: int) -> int:
    """Return the steps whose noise is drawn at once, a power of two, for actions of this width."""
    fitting = max(1, _NUMBERS_PER_BLOCK // max(1, width))
    return int(min(_MAX_STEPS_PER_BLOCK, 1 << (fitting.bit_length() - 1)))


class Noise(enum.IntEnum):
    """What an action is made from; the value keeps the streams of the kinds apart."""

    NORMAL = 1
    GUMBEL = 2
    UNIFORM = 3


_RESET = 0  # beside the kinds of noise in the counter's last word
_COUNTED, _NAMED, _TASKS, _NAMED_TASKS = 0, 1, 2, 3  # kinds of key


def _key(root: int, kind: int, number: int) -> NDArray[np.uint64]:
    sequence = np.random.SeedSequence(root, spawn_key=(kind, number))
    return sequence.generate_state(2, np.uint64).astype(np.uint64)


class Seeds:
    """Where a sampler's randomness comes from: its root seed and the count of its calls.

    Args:
        seed: The root seed; None: fresh entropy of the OS.
    """

    def __init__(self, seed: int | None) -> None:
        self._has_root = seed is not None
        entropy = np.random.SeedSequence(seed).entropy
        assert isinstance(entropy, int)
        self._root = entropy
        self._num_requests = 0
        self._num_task_draws = 0
        self._source = _Source()

    def next_request(self, seed: int | None) -> "EpisodeStreams":
        """Return the streams of a request.

        Args:
            seed: Replaces the request's number, and leaves the count as it is. Where the sampler
                has no root seed, it alone decides.
        """
        if seed is not None:
            root = self._root if self._has_root else 0
            return EpisodeStreams(_key(root, _NAMED, seed), self._source)
        number = self._num_requests
        self._num_requests += 1
        return EpisodeStreams(_key(self._root, _COUNTED, number), self._source)

    def next_tasks(self, seed: int | None = None) -> int:
        """Return the seed of a draw of tasks; `seed` is as in `next_request`."""
        if seed is not None:
            key = _key(self._root if self._has_root else 0, _NAMED_TASKS, seed)
        else:
            key = _key(self._root, _TASKS, self._num_task_draws)
            self._num_task_draws += 1
        return int(key[0] >> np.uint64(33))


class _Source:
    """The generator that all streams of a sampler draw from, each from a state of its own.

    To make one costs a third of a call of `sample()`, to set its state a tenth of that.
    """

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)
        self.generator = np.random.Generator(self.philox)
        self.fresh = self.philox.state
        """A state whose buffers are marked empty."""


class EpisodeStreams:
    """The streams of one request.

    All streams of a `Seeds` share a generator: only one thread may draw from them.

    Args:
        key: Two words; see `Seeds`.
        source: Of the sampler.
        first: What batch id 0 stands for.
    """

    def __init__(self, key: NDArray[np.uint64], source: _Source, first: int = 0) -> None:
        self.first = first
        self._philox = source.philox
        self._generator = source.generator
        self._state = source.fresh | {"state": {"counter": np.zeros(4, np.uint64), "key": key}}
        self._counter = self._state["state"]["counter"]

    def starting_at(self, first: int) -> "EpisodeStreams":
        """Return the same streams with the batch ids counted from `first`."""
        twin = copy.copy(self)
        twin.first = first
        return twin

    def _seek(self, purpose: int, batch_id: int, block: int) -> None:
        counter = self._counter
        counter[0] = 0
        counter[1] = block
        counter[2] = self.first + batch_id
        counter[3] = purpose
        self._philox.state = self._state

    def reset_seed(self, batch_id: int) -> int:
        """Return what the episode's environment is reset with, in [0, 2**31)."""
        self._seek(_RESET, batch_id, 0)
        return int(self._philox.random_raw()) >> 33

    def reset_seeds(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the reset seeds of the batch ids `start` to `stop - 1`."""
        return np.array([self.reset_seed(batch_id) for batch_id in range(start, stop)], np.int64)

    def draw(self, kind: Noise, batch_id: int, block: int, out: NDArray[np.float32]) -> None:
        """Draw the raw noise of one block of an episode's steps into `out`.

        Args:
            kind: Standard normal; standard exponential, of which a Gumbel variable is made; or
                uniform in [0, 1).
            batch_id: The episode.
            block: Steps `block * steps_per_block(width)` and the following ones.
            out: Contiguous, shape `(steps_per_block(width), width)`.
        """
        self._seek(kind, batch_id, block)
        if kind is Noise.NORMAL:
            self._generator.standard_normal(dtype=np.float32, out=out)
        elif kind is Noise.GUMBEL:
            self._generator.standard_exponential(dtype=np.float32, out=out)
        else:
            self._generator.random(dtype=np.float32, out=out)
