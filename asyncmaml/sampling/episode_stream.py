"""`sampler.stream(...)`: episodes one by one, as they complete. Runs in the caller's event loop.

Each episode is a request of its own that counts its batch id from where the stream stands, so it
is, bit for bit, what `sample()` with the same seed returns under that id. Requests that share a
policy and its parameters share their forwards.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from torch import Tensor

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import EpisodeError
from asyncmaml.sampling.engine import Engine
from asyncmaml.sampling.mailbox import Mailbox
from asyncmaml.sampling.requests import Deliver, Request
from asyncmaml.sampling.snapshot import Policy, PolicySnapshot

RequestMaker = Callable[[PolicySnapshot, int, Deliver], Request]
"""Makes the request of one episode: of a policy, with a batch id, for a receiver."""
SnapshotMaker = Callable[[Policy, Mapping[str, Tensor] | None], PolicySnapshot]


class EpisodeStream(AsyncIterator[BatchEpisodes]):
    """Episodes as they complete, or in the order of their batch ids.

    Leave the loop at any time: with the last reference to the stream, or with `aclose()`, its
    rows are free for other requests after their next step.

    Args:
        engine: Where the requests go.
        mailbox: Of the caller's loop.
        make_request: See `RequestMaker`.
        take_snapshot: Copies a policy's parameters.
        snapshot: The policy and its parameters; `update` changes these.
        batch_size: Episodes after which the stream ends; None: it goes on for ever.
        ordered: In the order of the batch ids, and not of completion.
        look_ahead: Episodes that may be under way or in and not yet taken.
        skips_failed: Go on without an episode that has failed.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        make_request: RequestMaker,
        take_snapshot: SnapshotMaker,
        snapshot: PolicySnapshot,
        *,
        batch_size: int | None,
        ordered: bool,
        look_ahead: int,
        skips_failed: bool,
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._make_request = make_request
        self._take_snapshot = take_snapshot
        self._snapshot = snapshot
        self._version = 0
        self._batch_size = batch_size
        self._ordered = ordered
        self._look_ahead = look_ahead
        self._skips_failed = skips_failed
        self._under_way: dict[int, Request] = {}
        self._versions: dict[int, int] = {}
        self._arrived: dict[int, BatchEpisodes | BaseException] = {}
        self._order: deque[int] = deque()
        self.num_dropped = 0
        """Episodes that failed and were left out."""
        self._num_begun = 0
        self._next_id = 0  # to be taken next, where that is ordered
        self._news = asyncio.Event()
        self._is_closed = False

    def update(self, params: Mapping[str, Tensor] | None = None) -> None:
        """Change the parameters for the episodes that are not yet begun.

        Args:
            params: Replace the policy's own; None: the policy's own, as they are now.
        """
        self._snapshot = self._take_snapshot(self._snapshot.origin, params)
        self._version += 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchEpisodes:
        """Return the next episode, as `BatchEpisodes` of one.

        Raises:
            StopAsyncIteration: `batch_size` episodes have been taken, or the stream is closed.
            AsyncMAMLError: What `sample()` would raise for this episode; the stream is closed.
        """
        while not self._is_closed:
            self._begin()
            taken = self._take()
            if isinstance(taken, EpisodeError) and self._skips_failed:
                self.num_dropped += 1
                continue
            if isinstance(taken, BaseException):
                await self.aclose()
                raise taken
            if taken is not None:
                return taken
            if not self._under_way:
                await self.aclose()
                break
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    def _begin(self) -> None:
        """Begin as many episodes as the look-ahead allows."""
        while len(self._under_way) + len(self._arrived) < self._look_ahead:
            batch_id = self._num_begun
            if batch_id == self._batch_size:
                return
            request = self._make_request(self._snapshot, batch_id, self._receiver(batch_id))
            self._num_begun += 1
            self._under_way[batch_id] = request
            self._versions[batch_id] = self._version
            self._engine.submit(request)

    def _take(self) -> BatchEpisodes | BaseException | None:
        """Return what is to be handed out next, if it is in."""
        if self._ordered:
            batch_id = self._next_id
            if batch_id not in self._arrived:
                return None
            self._next_id += 1
        else:
            if not self._order:
                return None
            batch_id = self._order.popleft()
        taken = self._arrived.pop(batch_id)
        version = self._versions.pop(batch_id)
        if isinstance(taken, BatchEpisodes):
            taken.params_version = version
        return taken

    def _receiver(self, batch_id: int) -> Deliver:
        # Weak: a stream that is left must not be kept by the requests that it has begun.
        stream, mailbox = weakref.ref(self), self._mailbox

        def receive(result: BatchEpisodes | BaseException) -> None:
            receiver = stream()
            if receiver is None or receiver._under_way.pop(batch_id, None) is None:
                return
            receiver._arrived[batch_id] = result
            if not receiver._ordered:
                receiver._order.append(batch_id)
            receiver._news.set()

        def deliver(result: BatchEpisodes | BaseException) -> None:
            with suppress(RuntimeError):  # the caller's loop has ended
                mailbox.post(receive, result)

        return deliver

    def _cancel(self) -> None:
        self._is_closed = True
        for request in self._under_way.values():
            self._engine.cancel(request)
        self._under_way.clear()
        self._arrived.clear()
        self._order.clear()

    async def aclose(self) -> None:
        """End the stream; what is under way is dropped. Idempotent."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self._cancel()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._under_way)} episodes under way"
        return f"<EpisodeStream [{state}, {len(self._arrived)} waiting to be taken]>"
