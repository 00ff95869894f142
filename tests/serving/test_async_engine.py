"""Many at once on one event loop: all get their tokens, and whoever leaves frees the slot."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from unittest.mock import Mock

import pytest
from engine_kinds import KINDS, finished, requests
from random_pairs import SPECS, pair_engine

from fly_jax import AsyncEngine, Engine, FlyJaxError, Margin, Request, RequestState, TokenStream


@pytest.fixture(scope="module")
def engine() -> Engine:
    # Without ends of text: every request has as many tokens as it asks for.
    spec = SPECS["autoregressive"].with_static(eos_token_ids=(), rounds_per_dispatch=2)
    return pair_engine(2, spec, rows=3, prefill_chunk=32, offline=False)


async def tokens(running: AsyncEngine, request: Request) -> list[int]:
    return await tokens_of(await running.submit(request))


async def tokens_of(stream: TokenStream) -> list[int]:
    found: list[int] = []
    async for settled in stream:
        found += settled.token_ids
    return found


async def refused(words: str, asked: Awaitable[object]) -> FlyJaxError:
    with pytest.raises(FlyJaxError, match=words) as caught:
        await asked
    return caught.value


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


def test_all_get_their_tokens_and_whoever_leaves_frees_the_slot(engine: Engine) -> None:
    given = requests(KINDS["autoregressive"], 40)
    wanted = [one.generation.token_ids for one in finished(engine, given)]

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
    """And who stops waiting for the end stops nobody."""
    going = asyncio.create_task(tokens(running, Request([1], 80)))
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.drain(), 0.001)
    await running.drain()
    assert running.engine.is_idle
    await refused("takes no more", running.submit(Request([1])))
    assert len(await going) == 80


def test_leaving_cancels_what_is_going(engine: Engine) -> None:
    async def run() -> None:
        async with AsyncEngine(engine) as running:
            streams = [await running.submit(Request([index], 90)) for index in range(5)]
        for stream in streams:
            assert stream.state.is_finished
            await refused("does not run", tokens_of(stream))
            await stream.aclose()

    asyncio.run(run())
    assert engine.slots.num_free == 3


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
    await refused("in use already", running.__aenter__())


def test_it_can_be_entered_again_and_refuses_meanwhile(engine: Engine) -> None:
    async def run() -> None:
        running = AsyncEngine(engine)
        await refused("does not run", running.drain())
        for _ in range(2):
            await refused("does not run", running.submit(Request([1])))
            async with running:
                await refused("is empty", running.submit(Request([])))
                await refused("of a kind", running.submit(Request([1], rule=Margin())))
                assert len(await tokens(running, Request([1], 5))) == 5
        await refused("does not run", running.submit(Request([1])))

    asyncio.run(run())


@within
async def test_who_reads_too_slowly_is_stopped(running: AsyncEngine) -> None:
    stream = await running.submit(Request([1], 90), max_unread=3)
    assert len(await tokens_of(await running.submit(Request([2], 90)))) == 90
    await running.drain()
    assert stream.state.generation.finish_reason == "cancelled"
    await refused("not read as they came", tokens_of(stream))
    assert 0 < len(stream.state.generation.token_ids) < 90


@pytest.mark.parametrize("fails", ["step", "cancel"])
def test_a_failure_reaches_everyone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    fail = Mock(side_effect=RuntimeError("the chip is gone"))

    async def run() -> None:
        async with AsyncEngine(engine) as running:
            streams = [await running.submit(Request([index], 90)) for index in (1, 2)]
            monkeypatch.setattr(engine, fails, fail)
            if fails == "cancel":
                running.cancel(streams[0])
                assert await asyncio.wait_for(tokens_of(streams.pop(0)), 60) is not None
            for one in streams:
                waits = asyncio.wait_for(tokens_of(one), 60)
                await refused(r"has failed.*the chip is gone", waits)
            await refused("the chip is gone", running.submit(Request([3])))
            error = await refused("the chip is gone", running.ended())
            assert isinstance(error.__cause__, RuntimeError)

    asyncio.run(run())
