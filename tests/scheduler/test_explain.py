"""Explanations of a cached prefix: each reason, and the page of the tree."""

import msgspec
import numpy as np
import pytest

from rootlace.runtime.contracts.messages import EngineRequest, TreePage
from rootlace.runtime.scheduler.inspection import TickTimes
from rootlace.runtime.scheduler.pacing import PromptPace
from rootlace.wire.protocol import CacheReport, SamplingParams
from tests.scheduler.world import Job, World

PROMPT = list(range(10, 40))


def explain(
    world: World, prompt: list[int], namespace: str = "", scope: str = "all"
) -> CacheReport:
    return world.scheduler.view.explain(namespace, np.array(prompt, np.int32), scope)  # type: ignore[arg-type]


def test_a_prompt_that_nobody_sent_before() -> None:
    world = World()
    assert explain(world, PROMPT) == CacheReport(0, 29, "new")
    world.run(PROMPT, max_tokens=0)
    # It goes on where the cached one ended.
    assert explain(world, [*PROMPT, 1, 2]) == CacheReport(30, 31, "new")
    assert explain(world, PROMPT) == CacheReport(29, 29, "whole")


def test_the_first_token_that_differs() -> None:
    world = World()
    world.run(PROMPT, max_tokens=0)
    other = [*PROMPT[:7], 99, *PROMPT[8:]]
    report = explain(world, other)
    assert report == CacheReport(
        7, 29, "differs", instead=tuple(PROMPT[7 : 7 + 16]), continuations=1
    )
    world.run(other, max_tokens=0)
    report = explain(world, [*PROMPT[:7], 98, 97])
    assert report.instead[:2] == (99, PROMPT[8]) and report.continuations == 2
    # With another first token, what differs is the whole prompt.
    assert explain(world, [1, 2, 3]).continuations == 1


def test_evicted_for_a_program_or_flushed() -> None:
    world = World(num_blocks=12)
    world.run(PROMPT, max_tokens=0)
    world.run([50 + token for token in range(40)], max_tokens=0, program="greedy")
    report = explain(world, PROMPT)
    assert report.reason == "evicted" and report.lost_to == "greedy"
    assert report.matched + report.lost == 29
    # Another namespace is not told of programs that are not its own.
    world.run(PROMPT, max_tokens=0, namespace="tenant")
    world.run([50 + token for token in range(40)], max_tokens=0, program="greedy")
    report = explain(world, PROMPT, "tenant")
    assert report.reason == "evicted" and report.lost_to == ""

    world = World()
    world.run(PROMPT, max_tokens=0)
    world.scheduler.cache.flush()
    assert explain(world, PROMPT).reason == "flushed"
    world.run(PROMPT, max_tokens=0)
    assert explain(world, PROMPT).reason == "whole"


def test_a_few_evicted_tokens_do_not_hide_what_differs() -> None:
    """Any two prompts begin alike."""
    world = World()
    world.run(PROMPT, max_tokens=0)
    world.scheduler.cache.flush()
    world.run([PROMPT[0], 99, 98, *PROMPT[3:]], max_tokens=0)
    report = explain(world, [*PROMPT[:3], *range(60, 80)])
    assert (report.matched, report.lost, report.reason) == (1, 2, "differs")
    assert report.instead[:2] == (99, 98)
    # The rest of the prompt, or much of it, explains the miss.
    assert explain(world, PROMPT[:4]).reason == "flushed"
    assert explain(world, PROMPT).reason == "flushed"


def test_another_namespace_is_told_of_only_where_that_is_asked() -> None:
    world = World()
    world.run(PROMPT, max_tokens=0, namespace="tenant")
    assert explain(world, PROMPT) == CacheReport(0, 29, "namespace", elsewhere=29)
    assert explain(world, PROMPT, scope="own") == CacheReport(0, 29, "new")


def test_a_cache_that_is_switched_off() -> None:
    world = World(enabled=False)
    world.run(PROMPT, max_tokens=0)
    assert explain(world, PROMPT) == CacheReport(0, 29, "disabled")


def submit(world: World, prompt: list[int], scored_from: int | None = None, **more: object) -> int:
    """Submit as `World.submit` does, with a report."""
    rid = len(world.jobs)
    params = SamplingParams(max_tokens=2, seed=0, prompt_logprobs_from=scored_from)
    ids = np.array(prompt, np.int32)
    world.scheduler.add(EngineRequest(rid, ids, params, report="own", **more))  # type: ignore[arg-type]
    world.jobs[rid] = Job(prompt, params, "")
    return rid


@pytest.mark.parametrize("overlap", [False, True])
def test_the_report_comes_once_with_the_first_update(overlap: bool) -> None:
    """The figures are those at admission: tokens computed by others in the same step count as
    cached."""
    world = World(overlap=overlap, max_step_tokens=1000)
    rids = [submit(world, [*PROMPT, 1, 2]), submit(world, [*PROMPT, 5, 6]), submit(world, PROMPT)]
    world.drain()
    reports = []
    for rid in rids:
        first, *later = world.jobs[rid].updates
        assert first.facts is not None and first.facts.report is not None
        assert all(update.facts in (None, first.facts) for update in later)
        assert first.facts.report.matched == first.facts.cached_tokens
        reports.append(msgspec.structs.replace(first.facts.report, saved_seconds=0.0))
    assert [(report.matched, report.reason) for report in reports] == [
        (0, "new"),
        (30, "differs"),
        (29, "whole"),
    ]


def test_a_prompt_whose_own_figures_are_wanted_is_computed() -> None:
    world = World()
    world.run(PROMPT, max_tokens=0)
    rids = [submit(world, PROMPT, scored_from=at) for at in (0, 10)]
    world.drain()
    reports = [world.jobs[rid].updates[0].facts.report for rid in rids]
    assert reports[0] == CacheReport(0, 29, "scored")
    assert reports[1] == CacheReport(9, 29, "scored")


def test_what_was_saved_follows_the_pace_of_large_steps() -> None:
    pace = PromptPace()
    pace.note(40, 1, 99.0)  # too small to say anything
    assert pace.seconds(100) == 0.0
    for _ in range(50):
        pace.note(1000, 2, 0.5)
    assert pace.seconds(100) == pytest.approx(0.05)
    for _ in range(50):
        pace.note(1000, 2, 1.0)
    assert pace.seconds(100) == pytest.approx(0.1, rel=0.01)


def test_ticks_have_times() -> None:
    times = TickTimes()
    assert times.seconds_since(5, 100.0) == 0.0
    for tick, now in [(10, 100.0), (20, 100.4), (30, 101.5), (40, 105.0)]:
        times.note(tick, now)
    assert times.seconds_since(10, 110.0) == 10.0
    assert times.seconds_since(25, 110.0) == 10.0  # before the second note that counts
    assert times.seconds_since(39, 110.0) == 8.5
    assert times.seconds_since(1, 110.0) == 10.0


def test_the_page_of_the_tree() -> None:
    world = World()
    world.run(PROMPT, max_tokens=0, program="agent")
    world.run([*PROMPT[:10], 1, 2, 3], max_tokens=0, namespace="")
    world.run([7, 8, 9], max_tokens=0, namespace="tenant")
    page = world.scheduler.view.tree_page(None, 0, 100)
    assert (
        (page.total, page.tokens) == (world.stats["nodes"], world.stats["tree_tokens"]) == (4, 36)
    )
    nodes = {node.id: node for node in page.nodes}
    assert len(nodes) == 4
    for at, node in enumerate(page.nodes):
        if node.parent:
            assert nodes[node.parent].end == node.start
            assert page.nodes.index(nodes[node.parent]) < at
    shared = next(node for node in page.nodes if node.end == 10)
    assert shared.head == tuple(PROMPT[:10]) and shared.children == 2 and shared.uses == 2
    long = next(node for node in page.nodes if node.end == 30)
    assert long.head == tuple(PROMPT[10:30]) and long.programs == ("agent",) and not long.locked
    assert [node.namespace for node in page.nodes].count("tenant") == 1

    # One tenant is not told how much the others have.
    own = world.scheduler.view.tree_page("tenant", 0, 9)
    assert {n.namespace for n in own.nodes} == {"tenant"} and own.complete and own.total is None
    assert world.scheduler.view.tree_page("nobody", 0, 9) == TreePage(())
    short = world.scheduler.view.tree_page(None, 0, 2)
    assert len(short.nodes) == 2 and not short.complete and short.total == 4
    assert page.complete and world.scheduler.view.tree_page(None, 0, 4).complete
    below = world.scheduler.view.tree_page("", shared.id, 9).nodes
    assert {node.parent for node in below} == {shared.id} and len(below) == 2
    assert world.scheduler.view.tree_page(None, 10**9, 9).nodes == ()

    world.submit([*PROMPT, 50], max_tokens=50)
    world.step()
    running = [node for node in world.scheduler.view.tree_page(None, 0, 9).nodes if node.requests]
    assert running and all(node.locked and node.requests == (3,) for node in running)
