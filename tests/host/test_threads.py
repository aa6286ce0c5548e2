"""The thread pool, and the BLAS library that is held to one thread while it works."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import threadpoolctl

import cuflash
from cuflash.host import threads

pytestmark = pytest.mark.timeout(60)  # a deadlock shows as a failure, soon

TIMEOUT = 10  # seconds; past it something hangs
GIVEN = 2  # BLAS threads before a call; set by the tests, so that a machine of one core will do


def blas_threads() -> set[int]:
    return {
        library["num_threads"]
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    }


@pytest.fixture(autouse=True)
def blas() -> Iterator[None]:
    """Start a test with BLAS on two threads, and see that it ends so."""
    with threadpoolctl.threadpool_limits(GIVEN, user_api="blas"):
        assert blas_threads() == {GIVEN}
        yield
        assert blas_threads() == {GIVEN}


@pytest.fixture(autouse=True, params=[2, 4])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give the engine a pool of some threads, whatever the machine has."""
    monkeypatch.setattr(threads, "worker_count", lambda: request.param)
    threads._pool.cache_clear()
    yield request.param
    threads._pool().shutdown()
    threads._pool.cache_clear()


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_every_task_runs_once(count: int) -> None:
    done: list[int] = []
    threads.run([lambda i=i: done.append(i) for i in range(count)])
    assert sorted(done) == list(range(count))


def test_tasks_run_at_the_same_time(workers: int) -> None:
    """Each waits until all are there."""
    barrier = threading.Barrier(workers)
    threads.run([lambda: barrier.wait(TIMEOUT) and None] * workers)


def test_blas_has_one_thread_inside() -> None:
    inside: list[set[int]] = []
    threads.run([lambda: inside.append(blas_threads())])
    threads.run([lambda: inside.append(blas_threads())] * 5)
    assert inside == [{1}] * 6
    assert blas_threads() == {GIVEN}


@pytest.mark.parametrize("first_out", ["first in", "last in"])
def test_overlapping_calls_share_the_hold(first_out: str) -> None:
    """Whoever leaves last restores, in whichever order they leave."""
    entered = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]

    def call(i: int) -> None:
        def task() -> None:
            entered[i].set()
            assert leave[i].wait(TIMEOUT)

        threads.run([task])

    calls = []
    for i in range(2):
        calls.append(in_thread(lambda i=i: call(i)))
        assert entered[i].wait(TIMEOUT)
        assert blas_threads() == {1}
    order = (0, 1) if first_out == "first in" else (1, 0)
    leave[order[0]].set()
    calls[order[0]].join(TIMEOUT)
    assert blas_threads() == {1}
    leave[order[1]].set()
    calls[order[1]].join(TIMEOUT)
    assert blas_threads() == {GIVEN}


def test_the_caller_s_own_limits_stay_in_force() -> None:
    """Neither do they keep a call of another thread from its hold, nor does that outlast it."""
    called, leave = threading.Event(), threading.Event()

    def call() -> None:
        test_blas_has_one_thread_inside()
        called.set()
        assert leave.wait(TIMEOUT)

    with threadpoolctl.threadpool_limits(GIVEN + 1, user_api="blas"):
        with threadpoolctl.threadpool_limits(GIVEN, user_api="blas"):
            caller = in_thread(call)
            assert called.wait(TIMEOUT)
        assert blas_threads() == {GIVEN + 1}
    leave.set()
    caller.join(TIMEOUT)


def test_many_overlapping_calls() -> None:
    inside: list[set[int]] = []

    def call() -> None:
        for count in (1, 3, 2):
            threads.run([lambda: inside.append(blas_threads())] * count)

    for caller in [in_thread(call) for _ in range(8)]:
        caller.join(TIMEOUT)
    assert inside == [{1}] * 48
    assert blas_threads() == {GIVEN}


@pytest.mark.parametrize("count", [1, 5])
def test_an_exception_is_raised_and_blas_restored(count: int) -> None:
    def fail() -> None:
        raise ArithmeticError("here")

    with pytest.raises(ArithmeticError, match="here"):
        threads.run([fail] * count)
    assert blas_threads() == {GIVEN}
    test_every_task_runs_once(7)


def test_an_exception_in_one_call_does_not_end_the_hold_of_another() -> None:
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        assert leave.wait(TIMEOUT)

    other = in_thread(lambda: threads.run([stay]))
    assert entered.wait(TIMEOUT)
    with pytest.raises(ZeroDivisionError):
        threads.run([lambda: 1 // 0 and None] * 3)
    assert blas_threads() == {1}
    leave.set()
    other.join(TIMEOUT)
    assert blas_threads() == {GIVEN}


def test_an_error_waits_for_the_running_and_drops_the_rest() -> None:
    running = threading.Event()
    ended: list[str] = []

    def fail() -> None:
        assert running.wait(TIMEOUT)
        raise ArithmeticError

    def slow() -> None:
        running.set()
        time.sleep(0.1)
        ended.append("slow")

    def later() -> None:
        time.sleep(0.002)
        ended.append("later")

    with pytest.raises(ArithmeticError):
        threads.run([fail, slow, *[later] * 1000])
    assert "slow" in ended
    count = len(ended)
    assert count < 1000
    time.sleep(0.02)
    assert len(ended) == count  # nothing runs on once the caller knows


def test_the_first_of_several_errors_is_raised() -> None:
    both = threading.Barrier(2)

    def fail(error: Exception) -> None:
        both.wait(TIMEOUT)
        raise error

    with pytest.raises(KeyError):
        threads.run([lambda: fail(KeyError()), lambda: fail(IndexError())])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise also where the suite inherits that it is ignored, as in the background."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no such signals")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_running_and_drops_the_rest() -> None:
    """Also if the user loses patience: a task that runs on would write into arrays of the past."""
    ended: list[str] = []

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def slow() -> None:
        for _ in range(4):
            time.sleep(0.05)
            interrupt()
        time.sleep(0.05)
        ended.append("slow")

    def later() -> None:
        time.sleep(0.01)
        ended.append("later")

    with pytest.raises(KeyboardInterrupt):
        threads.run([slow, *[later] * 1000])
    assert "slow" in ended
    count = len(ended)
    assert count < 100
    time.sleep(0.03)
    assert len(ended) == count
    assert blas_threads() == {GIVEN}
    test_every_task_runs_once(7)


AT_THE_END = """
import atexit, threading
import numpy as np
import cuflash
from cuflash.host import threads

threads.worker_count = lambda: 2
x = np.ones((8, 300, 4))
expected = cuflash.flash_attention(x, x, x)

def attend():
    np.testing.assert_array_equal(cuflash.flash_attention(x, x, x), expected)
    try:
        threads.run([lambda: None, lambda: 1 // 0, lambda: None])
    except ZeroDivisionError:
        print("done")

def outlive():
    threading.main_thread().join()
    attend()

{}
"""


@pytest.mark.parametrize(
    "how", ["threading.Thread(target=outlive).start()", "atexit.register(attend)"]
)
def test_calls_while_the_interpreter_ends(how: str) -> None:
    """The pool of Python's library takes no work then."""
    program = AT_THE_END.format(how)
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_a_pool_that_can_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    test_every_task_runs_once(7)


def test_a_nested_call_runs_inline() -> None:
    """Tasks that waited for a place in the pool they fill would wait for ever."""
    where: list[tuple[int, int]] = []

    def inner(outer: int) -> None:
        where.append((outer, threading.get_ident()))

    def outer() -> None:
        me = threading.get_ident()
        threads.run([lambda: inner(me)] * 3)
        assert blas_threads() == {1}

    threads.run([outer] * 8)
    assert len(where) == 24
    assert all(a == b for a, b in where)
    assert threading.get_ident() not in {a for a, _ in where}


def test_a_nested_error_comes_out() -> None:
    def outer() -> None:
        threads.run([lambda: 1 // 0 and None] * 2)

    with pytest.raises(ZeroDivisionError):
        threads.run([outer] * 3)


def test_attention_inside_a_task() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 300, 16))
    expected = cuflash.flash_attention(q, k, v)
    results: list[np.ndarray] = []
    threads.run([lambda: results.append(cuflash.flash_attention(q, k, v))] * 4)
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_calls_from_many_threads_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    problems = rng.standard_normal((6, 3, 4, 300, 16))
    expected = [cuflash.flash_attention(*problem) for problem in problems]
    results: list[np.ndarray | None] = [None] * len(problems)

    def call(i: int) -> None:
        results[i] = cuflash.flash_attention(*problems[i])

    for caller in [in_thread(lambda i=i: call(i)) for i in range(len(problems))]:
        caller.join(TIMEOUT)
    np.testing.assert_array_equal(results, expected)


def _attend_in_child() -> None:
    """Use the pool, which the parent's child must make anew."""
    assert blas_threads() == {GIVEN}
    test_tasks_run_at_the_same_time(threads.worker_count())
    test_blas_has_one_thread_inside()
    x = np.ones((8, 300, 4))
    np.testing.assert_array_equal(cuflash.flash_attention(x, x, x), x)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork"
)
@pytest.mark.filterwarnings("ignore:.*fork")  # Python and JAX warn of it
def test_a_fork_in_the_middle_of_a_call() -> None:
    """The child has neither the parent's threads nor its calls."""
    started, leave = threading.Barrier(3), threading.Event()

    def stay() -> None:
        started.wait(TIMEOUT)
        assert leave.wait(TIMEOUT)

    call = in_thread(lambda: threads.run([stay] * 2))
    try:
        started.wait(TIMEOUT)
        child = multiprocessing.get_context("fork").Process(target=_attend_in_child)
        child.start()
        child.join(TIMEOUT)
        hung = child.is_alive()
        child.kill()
        child.join()
        assert not hung
        assert child.exitcode == 0
        assert blas_threads() == {1}
    finally:
        leave.set()
        call.join(TIMEOUT)


def test_worker_count_is_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert threads.worker_count() >= 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert threads.worker_count() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert threads.worker_count() == 7
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert threads.worker_count() == 1
