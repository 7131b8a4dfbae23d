"""The scheduler alone, with random traffic: pages are counted exactly, no request starves, all pages are returned."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.scheduler import PROMPT_STEPS, Scheduler, Work
from rollmill.inference.engine import GenerateRequest
from rollmill.types import PolicyRef, Sampling

POLICY = PolicyRef("main", 0, "bf16", "digest")
CONFIG = EngineConfig(max_batch=3, block_size=4, cache_tokens=48, prefill_chunk=8)


def make_generation(
    number: int,
    prompt: int = 4,
    new: int = 4,
    traffic: Literal["production", "rollout"] = "rollout",
    session: str = "",
    min_version: int = 0,
    first: int = -1,
) -> Generation:
    first = number if first < 0 else first
    # contexts of two kinds, so that some share a prefix and others do not
    request = GenerateRequest(
        session or f"s{number}",
        [first, *[1] * (prompt - 1)],
        Sampling(max_tokens=new),
        traffic,
        min_version=min_version,
    )
    return Generation(number, request, False, min(prompt + new, CONFIG.cache_tokens), lambda chunk: None, 0)


def run(scheduler: Scheduler, work: list[Work]) -> list[Generation]:
    """Pretends to compute. Returns the generations that finished."""
    finished = []
    scheduler.prefixes.copies = []
    scheduler.advance(work, None, POLICY)
    for item in work:
        if not item.generation.missing and item.generation.sample(1, -1.0, POLICY) is not None:
            scheduler.finish(item.generation, "length")
            finished.append(item.generation)
    return finished


def check(scheduler: Scheduler, work: list[Work]) -> None:
    pages = scheduler.pages
    held = Counter(block for generation in scheduler.everyone() for block in generation.blocks)
    assert [held[page] for page in range(pages.size)] == list(pages._references), "one reference per request"
    assert sorted([*held, *pages._free, *pages._idle]) == list(range(pages.size)), "no page is lost or used twice"
    assert {page: key for key, page in pages._index.items()}.keys() == {n for n, keys in enumerate(pages._keys) if keys}
    assert set(pages._parts) <= set(pages._index), "a part that is not there is not looked for"
    assert Counter(pages._parts.values()) == Counter(
        {(parent, length): count for parent, counts in pages._lengths.items() for length, count in counts.items()}
    )
    assert len(scheduler.running) <= CONFIG.max_batch
    for before, item in zip([None, *work], work, strict=False):
        generation = item.generation
        assert generation.number in scheduler.running
        if item.twin_of is not None:
            assert not item.count and before is not None and item.twin_of in (before.generation, before.twin_of)
            assert before.completes and item.completes and item.twin_of.tokens == generation.tokens
            continue
        assert item.start == generation.computed
        assert len(generation.blocks) * CONFIG.block_size >= item.start + item.count
        written = generation.blocks[item.start // CONFIG.block_size :]
        assert not any(pages.is_shared(block) for block in written), "nobody writes to a shared page"
    assert sum(item.count for item in work if item.count > 1) <= CONFIG.prefill_chunk


arrivals = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it arrives
        st.integers(1, 40),  # prompt
        st.integers(1, 40),  # new tokens
        st.sampled_from(["production", "rollout"]),
        st.integers(0, 2),  # session
        st.booleans(),  # the client leaves early
        st.integers(0, 1),  # the first token
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(arrivals, st.booleans())
def test_random_traffic_always_ends(
    traffic: list[tuple[int, int, int, str, int, bool, int]], prompts_first: bool
) -> None:
    scheduler, finished, leaving = Scheduler(CONFIG, prompts_first=prompts_first), 0, []
    for number, (steps, prompt, new, kind, session, leaves, first) in enumerate(traffic):
        for _ in range(steps):
            finished += len(run(scheduler, scheduler.schedule(POLICY)))
        prompt = min(prompt, 47)
        generation = make_generation(number, prompt, new, kind, f"session {session}", first=first)  # type: ignore[arg-type]
        scheduler.add(generation)
        leaving += [generation] if leaves else []
        if len(leaving) > 2 and (gone := leaving.pop(0)) in scheduler.everyone():
            scheduler.finish(gone, "abort")
            finished += 1
    for _ in range(5000):
        work = scheduler.schedule(POLICY)
        check(scheduler, work)
        if not scheduler.everyone():
            break
        assert work, "some request can always continue"
        finished += len(run(scheduler, work))
    assert finished == len(traffic)
    assert scheduler.pages.available == scheduler.pages.size and not scheduler.prefixes._promises


def test_production_goes_first_from_the_queue() -> None:
    scheduler = Scheduler(CONFIG.model_copy(update={"max_batch": 1}))
    for generation in (make_generation(1), make_generation(2), make_generation(3, traffic="production")):
        scheduler.add(generation)
    assert [item.generation.number for item in scheduler.schedule(POLICY)] == [3]


def test_the_youngest_rollout_yields_its_place_and_keeps_its_pages() -> None:
    scheduler = Scheduler(CONFIG)
    rollouts = [make_generation(number) for number in (1, 2, 3)]
    for generation in rollouts:
        scheduler.add(generation)
    run(scheduler, scheduler.schedule(POLICY))  # the first two are computed, the budget ends there
    run(scheduler, scheduler.schedule(POLICY))
    scheduler.add(make_generation(4, traffic="production"))
    scheduler.schedule(POLICY)
    assert sorted(scheduler.running) == [1, 2, 4]
    assert rollouts[2].computed == 4 and rollouts[2].blocks, "its pages are kept unless pages run out"


def test_a_token_that_is_recorded_after_its_pages_are_gone_names_their_weights() -> None:
    """A production prompt takes the pages of a rollout whose token is on its way."""
    scheduler = Scheduler(CONFIG, prompts_first=True)
    rollout = make_generation(1, prompt=8, new=4)
    scheduler.add(rollout)
    scheduler.advance(scheduler.schedule(POLICY), None, POLICY)  # launched, and not recorded yet
    scheduler.add(make_generation(2, prompt=44, new=4, traffic="production"))
    while rollout.blocks:
        scheduler.advance(scheduler.schedule(POLICY), None, POLICY)
    assert rollout.sample(1, -1.0, POLICY) is None
    assert rollout.oldest is None and rollout.chunk("stop").oldest_kv_policy == POLICY


def test_nobody_waits_for_a_prompt_whose_last_piece_is_one_position() -> None:
    scheduler = Scheduler(CONFIG)
    first, cut = make_generation(1, prompt=4, new=9), make_generation(2, prompt=7, new=9)
    for generation in (first, cut):
        scheduler.add(generation)
    run(scheduler, scheduler.schedule(POLICY))
    scheduler.add(make_generation(3, prompt=6, new=9, traffic="production"))
    run(scheduler, scheduler.schedule(POLICY))  # production leaves two positions of the budget
    assert (cut.computed, cut.missing) == (6, 1) and cut.promised
    run(scheduler, scheduler.schedule(POLICY))
    assert len(cut.tokens) == 8 and not cut.promised and not scheduler.prefixes._promises


class CountedTokens(list[int]):
    """Counts how often it is compared as a whole."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        self.comparisons += 1
        return super().__eq__(other)


def test_a_group_on_a_long_prompt_is_compared_once_and_computed_once() -> None:
    scheduler = Scheduler(CONFIG)
    group = [make_generation(number, prompt=26, new=2, first=7) for number in range(3)]
    for generation in group:
        generation.tokens = CountedTokens(generation.tokens)
        scheduler.add(generation)
    computed: list[int] = []
    while scheduler.running or scheduler.waiting:
        work = scheduler.schedule(POLICY)
        computed += [item.count for item in work]
        run(scheduler, work)
    assert computed == [8, 8, 8, 2, 0, 0, 1, 1, 1], "one prompt in pieces, two twins, one token of each"
    compared = [tokens.comparisons for one in group if isinstance(tokens := one.tokens, CountedTokens)]
    assert sum(compared) == 2, compared


def test_idle_pages_are_taken_first_then_those_of_the_newest_rollout() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.add(make_generation(1, prompt=4, new=1, session="idle"))
    run(scheduler, scheduler.schedule(POLICY))
    assert scheduler.pages.idle == 1
    user, old, young = (
        make_generation(2, 8, 24, "production"),
        make_generation(3, 8, 30),
        make_generation(4, 8, 30),
    )
    for generation in (user, old, young):
        scheduler.add(generation)
    while not scheduler.preemptions:
        run(scheduler, scheduler.schedule(POLICY))
    assert scheduler.pages.claim("idle", [1] * 9) is None, "the idle page was evicted first"
    assert not young.blocks and young.computed == 0
    assert sorted(scheduler.running) == [2, 3]


def test_the_least_recently_used_pages_go_first() -> None:
    scheduler = Scheduler(CONFIG)
    for number, session in enumerate(("a", "b", "c")):
        scheduler.add(make_generation(number, 4, 1, session=session))
        run(scheduler, scheduler.schedule(POLICY))
    again = make_generation(5, 6, 1, session="a", first=0)  # a was used again
    scheduler.add(again)
    run(scheduler, scheduler.schedule(POLICY))
    assert again.cached_tokens == 4
    taken = scheduler.pages.take(scheduler.pages.available - 2)  # the pages of b and c
    last = make_generation(6, 9, 1, session="a", first=0)
    scheduler.add(last)
    scheduler.pages.give(taken)
    scheduler.schedule(POLICY)
    assert last.cached_tokens == 6, "b and c were evicted, a was not"


def test_a_long_prompt_is_computed_in_pieces_while_others_decode() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.add(make_generation(1, 4, 20))
    run(scheduler, scheduler.schedule(POLICY))
    scheduler.add(make_generation(2, 20, 4))
    counts = []
    for _ in range(4):
        work = scheduler.schedule(POLICY)
        counts.append({item.generation.number: item.count for item in work})
        run(scheduler, work)
    assert counts == [{1: 1, 2: 8}, {1: 1, 2: 8}, {1: 1, 2: 4}, {1: 1, 2: 1}]


def test_prompts_that_fill_whole_steps_go_before_running_rollouts_for_a_while() -> None:
    scheduler = Scheduler(CONFIG.model_copy(update={"cache_tokens": 480, "max_batch": 4}), prompts_first=True)
    for generation in (make_generation(1, 4, 60), make_generation(2, 4, 60, "production")):
        scheduler.add(generation)
    run(scheduler, scheduler.schedule(POLICY))
    scheduler.add(make_generation(3, 20, 4))
    counts = []
    for _ in range(4):
        work = scheduler.schedule(POLICY)
        counts.append({item.generation.number: item.count for item in work})
        run(scheduler, work)
    assert counts == [{2: 1, 3: 8}, {2: 1, 3: 8}, {1: 1, 2: 1, 3: 4}, {1: 1, 2: 1, 3: 1}]
    scheduler.add(make_generation(4, 300, 4))
    waits = []
    for _ in range(PROMPT_STEPS + 1):
        work = scheduler.schedule(POLICY)
        waits.append(1 not in {item.generation.number for item in work})
        run(scheduler, work)
    assert waits == [True] * PROMPT_STEPS + [False]


def test_a_request_for_a_later_version_does_not_block_others() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.add(make_generation(1, min_version=5))
    scheduler.add(make_generation(2))
    assert [item.generation.number for item in scheduler.schedule(replace(POLICY, number=4))] == [2]
    assert [item.generation.number for item in scheduler.schedule(replace(POLICY, number=5))] == [1, 2]


def test_a_request_computed_again_names_the_oldest_weights_that_it_attended_to() -> None:
    """Its first token attended to keys of version 0. Then it lost its pages, and all keys are version 1's."""
    newer = replace(POLICY, number=1, digest="newer")
    generation = make_generation(0)
    generation.continue_session([0], 3, POLICY)
    for _ in range(2):
        generation.advance(generation.missing, None, newer)
        generation.sample(1, -1.0, newer)
        generation.release()
    assert generation.chunk("length").oldest_kv_policy == POLICY
    # one that had not sampled yet attended to nothing else
    other = make_generation(1)
    other.advance(3, None, POLICY)
    other.release()
    other.advance(other.missing, None, newer)
    other.sample(1, -1.0, newer)
    assert other.chunk("length").oldest_kv_policy == newer
