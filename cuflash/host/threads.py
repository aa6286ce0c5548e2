"""The engine's thread pool, and the BLAS library held to one thread while the pool runs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from operator import itemgetter
from queue import SimpleQueue
from typing import Any

import threadpoolctl

_inside = threading.local()


def worker_count() -> int:
    """Return the number of processors this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    def enter_worker() -> None:
        _inside.worker = True

    return ThreadPoolExecutor(worker_count(), "cuflash", initializer=enter_worker)


class _BlasHold:
    """Holds the process's BLAS to one thread while any call is inside.

    The setting is global to the process, so overlapping calls share it: the first one in sets it,
    the last one out restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._libraries: list[Any] | None = None
        self._before: list[int] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._calls == 0:
                if self._libraries is None:  # looking up what is loaded takes milliseconds
                    blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
                    self._libraries = blas.lib_controllers
                self._before = [library.num_threads for library in self._libraries]
                self._set_threads([1] * len(self._libraries))
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    self._set_threads(self._before)

    def _set_threads(self, counts: list[int]) -> None:
        for library, count in zip(self._libraries or (), counts, strict=True):
            # threadpoolctl lets the first thread that sets OpenBLAS's limit keep that right, and
            # the calls of others silently do nothing. That may be the caller's, with a limit of its
            # own, and the last call out may be another thread's.
            release = getattr(library, "clear_controlling_thread", lambda *, force: None)
            release(force=True)
            library.set_num_threads(count)
            release(force=True)

    def reset(self) -> None:
        """Start afresh, as if no call were inside."""
        self._lock = threading.Lock()
        if self._calls:
            self._calls = 0
            self._set_threads(self._before)


single_threaded_blas = _BlasHold()


class _Batch:
    """The tasks of one call, which threads take one after the other until none is left.

    It goes without locks, since an interrupt could leave one held: the operations of a deque and of
    a set are atomic.
    """

    def __init__(self, tasks: Sequence[Callable[[], None]]) -> None:
        self._waiting = deque(enumerate(tasks))
        self.errors: list[tuple[int, BaseException]] = []
        self._busy: set[int] = set()
        self._left: SimpleQueue[None] = SimpleQueue()

    def _take(self) -> tuple[int, Callable[[], None]] | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        return None

    def work(self) -> None:
        """Run tasks in a thread of the pool; an error drops those that wait."""
        thread = threading.get_ident()
        # Before it takes a task, so that each task is waiting or in busy hands until it has ended.
        self._busy.add(thread)
        while taken := self._take():
            number, task = taken
            try:
                task()
            except BaseException as error:
                self.errors.append((number, error))
                self._waiting.clear()
        self._busy.discard(thread)
        self._left.put(None)

    def work_here(self) -> None:
        """Run tasks in the thread of the caller, who gets the error."""
        while taken := self._take():
            taken[1]()

    def wait(self) -> None:
        """Return when all tasks have ended."""
        while self._waiting or self._busy:
            self._left.get()

    def abandon(self) -> None:
        """Drop the tasks that wait and await those that run, through any number of interrupts."""
        while True:
            try:
                self._waiting.clear()
                while self._busy:  # the interrupt may have swallowed a word of `_left`
                    time.sleep(1e-3)
                return
            except BaseException:
                continue


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Run every task, on the pool if there are several; a call from within a task runs inline.

    Returns when all have ended. If one raises, or the caller is interrupted, those not yet begun
    are dropped, those running are awaited, so that nothing is written after the error reaches the
    caller, and the first error is raised.
    """
    with single_threaded_blas():
        if len(tasks) <= 1 or getattr(_inside, "worker", False) or worker_count() == 1:
            for task in tasks:
                task()
            return
        batch = _Batch(tasks)
        try:
            if not _offer(batch.work, min(len(tasks), worker_count())):
                batch.work_here()
            batch.wait()
        except BaseException:
            batch.abandon()
            raise
        if batch.errors:
            raise min(batch.errors, key=itemgetter(0))[1]


def _offer(work: Callable[[], None], times: int) -> bool:
    """Let the pool call `work` some times; False if it does not take them all.

    It takes none while the interpreter ends: at exit, or in a thread that outlives the main one.
    """
    try:
        for _ in range(times):
            _pool().submit(work)
    except RuntimeError:
        return False
    return True


def _after_fork() -> None:
    """Forget the parent's threads and calls in a child process, which has none of them."""
    _pool.cache_clear()
    single_threaded_blas.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
