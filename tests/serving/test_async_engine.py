"""Many at once on one event loop: all get their tokens, and whoever leaves frees the slot."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest
from random_pairs import CONFIG, random_target

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request, RequestState
from fly_jax.errors import FlyJaxError
from fly_jax.serving.async_engine import AsyncEngine, TokenStream
from fly_jax.verification.rules import Exact, Margin


@pytest.fixture(scope="module")
def engine() -> Engine:
    # Without ends of text: every request has as many tokens as it asks for.
    spec = RoundSpec(Exact(), RoundStatic(0, rounds_per_dispatch=2))
    return Engine(random_target(2), None, spec, num_slots=3, max_length=96, prefill_chunk=32)


def requests(number: int) -> list[Request]:
    chance = random.Random(3)
    return [
        Request([chance.randrange(CONFIG.vocab_size) for _ in range(chance.randint(1, 40))],
                chance.randint(1, 30))
        for _ in range(number)
    ]  # fmt: skip


def expected(engine: Engine, given: list[Request]) -> list[list[int]]:
    states = [engine.submit(one) for one in given]
    while not engine.is_idle:
        engine.step()
    return [one.generation.token_ids for one in states]


async def tokens(running: AsyncEngine, request: Request) -> list[int]:
    return await tokens_of(await running.submit(request))


async def tokens_of(stream: TokenStream) -> list[int]:
    found: list[int] = []
    async for settled in stream:
        found += settled.token_ids
    return found


def within(test: Callable[[AsyncEngine], Awaitable[None]]) -> Callable[[Engine], None]:
    """A test that runs in an engine that runs; no slot is taken after it."""

    def run(engine: Engine) -> None:
        async def entered() -> None:
            async with AsyncEngine(engine) as running:
                await test(running)
            await running.ended()

        asyncio.run(entered())
        assert engine.is_idle
        assert engine.slots.num_free == 3

    return run


def test_all_get_their_tokens(engine: Engine) -> None:
    given = requests(40)
    wanted = expected(engine, given)

    @within
    async def run(running: AsyncEngine) -> None:
        assert await asyncio.gather(*(tokens(running, one) for one in given)) == wanted

    run(engine)


def test_whoever_leaves_frees_the_slot(engine: Engine) -> None:
    given = requests(12)
    wanted = expected(engine, given)

    async def leave(running: AsyncEngine, request: Request, how: int) -> RequestState:
        stream = await running.submit(request)
        if how == 0:  # after the first tokens
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    break
        elif how == 1:  # in the middle of waiting
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            waiting = asyncio.ensure_future(tokens_of(stream))
            await asyncio.sleep(0)
            was_done = stream.state.is_finished  # if this machine had this thread wait that long
            running.cancel(stream)
            assert was_done or len(await waiting) < 90
            await waiting
        return stream.state

    @within
    async def run(running: AsyncEngine) -> None:
        going = [asyncio.create_task(tokens(running, one)) for one in given]
        left = [await leave(running, Request([index], 90), index % 3) for index in range(9)]
        assert await asyncio.gather(*going) == wanted
        await running.drain()
        assert all(one.is_finished for one in left)
        assert all(len(one.generation.token_ids) < 90 for one in left)

    run(engine)


@within
async def test_draining_waits_and_refuses(running: AsyncEngine) -> None:
    going = asyncio.create_task(tokens(running, Request([1], 40)))
    await asyncio.sleep(0.01)
    await running.drain()
    assert running.engine.is_idle
    with pytest.raises(FlyJaxError, match="takes no more"):
        await running.submit(Request([1]))
    assert len(await going) == 40


@within
async def test_what_is_refused_is_refused_at_once(running: AsyncEngine) -> None:
    with pytest.raises(FlyJaxError, match="is empty"):
        await running.submit(Request([]))
    with pytest.raises(FlyJaxError, match="of a kind"):
        await running.submit(Request([1], rule=Margin()))
    assert len(await tokens(running, Request([1], 3))) == 3


def test_leaving_cancels_what_is_going(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as running:
            streams = [await running.submit(Request([index], 90)) for index in range(5)]
        for stream in streams:
            assert stream.state.is_finished
            with pytest.raises(FlyJaxError, match="does not run"):
                await tokens_of(stream)
            await stream.aclose()

    asyncio.run(run())
    assert engine.slots.num_free == 3


@within
async def test_who_stops_waiting_for_the_end_stops_nobody(running: AsyncEngine) -> None:
    going = asyncio.create_task(tokens(running, Request([1], 80)))
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.drain(), 0.001)
    assert len(await going) == 80


@within
async def test_a_submit_that_is_cancelled_leaves_nothing_behind(running: AsyncEngine) -> None:
    for index in range(20):
        task = asyncio.create_task(running.submit(Request([index], 90)))
        await asyncio.sleep(0)
        task.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).aclose()
    await running.drain()
    with pytest.raises(FlyJaxError, match="in use already"):
        await running.__aenter__()


def test_it_can_be_entered_again_and_refuses_meanwhile(engine: Engine) -> None:
    async def run() -> None:
        running = AsyncEngine(engine)
        with pytest.raises(FlyJaxError, match="does not run"):
            await running.drain()
        for _ in range(2):
            with pytest.raises(FlyJaxError, match="does not run"):
                await running.submit(Request([1]))
            async with running:
                assert len(await tokens(running, Request([1], 5))) == 5
        with pytest.raises(FlyJaxError, match="does not run"):
            await running.submit(Request([1]))

    asyncio.run(run())


@within
async def test_who_reads_too_slowly_is_stopped(running: AsyncEngine) -> None:
    stream = await running.submit(Request([1], 90), max_unread=3)
    going = await running.submit(Request([2], 90))
    assert len(await tokens_of(going)) == 90
    await running.drain()
    assert stream.state.generation.finish_reason == "cancelled"
    with pytest.raises(FlyJaxError, match="not read as they came"):
        await tokens_of(stream)
    assert 0 < len(stream.state.generation.token_ids) < 90


def test_a_failure_reaches_everyone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the chip is gone")

    async def run() -> None:
        async with AsyncEngine(engine) as running:
            streams = [await running.submit(Request([index], 90)) for index in (1, 2)]
            monkeypatch.setattr(engine, "step", fail)
            for one in streams:
                with pytest.raises(FlyJaxError, match=r"has failed.*the chip is gone"):
                    await tokens_of(one)
            with pytest.raises(FlyJaxError, match="the chip is gone"):
                await running.submit(Request([3]))
            with pytest.raises(FlyJaxError, match="the chip is gone") as caught:
                await running.ended()
            assert isinstance(caught.value.__cause__, RuntimeError)

    asyncio.run(run())
