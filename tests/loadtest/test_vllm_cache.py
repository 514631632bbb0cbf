"""The reference of vLLM's prefix cache: its rules by hand, its numbers as measured; and our scheduler beside it."""

from functools import cache

import pytest

from loadtest.datasets import Sampling
from loadtest.prefix import simulated_hits
from loadtest.records import Job, LoadTestError
from loadtest.trace import Hits, ideal, read_trace
from loadtest.vllm_cache import vllm_hits

LOOP = {"concurrency": 1, "max_batched_tokens": 8192}
AMPLE = 60_000


@cache
def trace(path, output_len=None):
    return read_trace(Sampling(path, 2000, output_len=output_len))


def tokens(*pages, rest=0):
    """A prompt of pages of 4 equal tokens, and some more."""
    return tuple(page for page in pages for _ in range(4)) + (99,) * rest


def hits(prompts, num_blocks, output_len=1, **loop):
    requests = [Job(prompt, output_len) for prompt in prompts]
    return vllm_hits(requests, num_pages=num_blocks, page_size=4, **{**LOOP, **loop}).cached


def test_a_cached_prompt_computes_its_last_page():
    assert hits([tokens(1, 2)] * 2, 100) == 4
    assert hits([tokens(1, 2, rest=1)] * 2, 100) == 8
    assert hits([tokens(1, 2), tokens(3, 2)], 100) == 0  # a page is found by all before it


def test_generated_pages_are_found():
    # 5 + 4 tokens: the second page is full when its last token is computed, which the very last one is not.
    answer = (*tokens(1, rest=1), 0, 0, 0)
    assert hits([tokens(1, rest=1), (*answer, 7)], 100, output_len=4) == 8
    assert hits([tokens(1, rest=1), (*answer, 7)], 100, output_len=3) == 4


def test_equal_prompts_of_one_step_share():
    assert hits([tokens(1, 2, rest=1)] * 3, 100, concurrency=3) == 16


def test_the_tail_and_what_cannot_be_found_go_first():
    # Four blocks of use. 1-2 and its partial page leave one never used; 3-4 takes that one after the partial one.
    first, other = tokens(1, 2, rest=1), tokens(3, 4)
    assert hits([first, other, first], 5) == 8
    # Three of use: 3-4 takes the partial page and the tail (2); the head is still found.
    assert hits([first, other, first], 4) == 4


def test_a_request_that_no_pool_can_hold_is_refused():
    assert hits([tokens(1, 2)], 4, output_len=4) == 0  # all three blocks that there are
    with pytest.raises(LoadTestError, match="larger than 3 blocks"):
        hits([tokens(1, 2)], 4, output_len=5)


def test_the_last_is_preempted_and_counted_once():
    # Five blocks of use, two prompts of two. The ninth token of the first takes the last block; the second, which lacks
    # one then, gives its own back and is admitted again, finding its first page.
    requests = [Job(tokens(page, rest=3), 3) for page in (1, 2)]
    assert vllm_hits(requests, num_pages=6, page_size=4, concurrency=2, max_batched_tokens=64) == Hits(14, 0)


def test_numbers_measured_on_vllm(data_file):
    requests = trace(data_file("prefix_trace.jsonl"), 1)
    for num_blocks, cached in ((AMPLE, 252_032), (4_000, 81_584)):
        assert vllm_hits(requests, num_pages=num_blocks, page_size=16, **LOOP) == Hits(856_614, cached)


def test_ideal_rates(data_file, own_data):
    """The curve was computed by another program, which touches pages in another order."""
    prompts = [request.prompt for request in trace(data_file("prefix_trace.jsonl"), 1)]
    assert ideal(prompts, 16).cached == 252_032
    for pages, rate in {1000: 0.0414, 4000: 0.0937, 16_000: 0.2539, 32_000: 0.2938}.items():
        assert ideal(prompts, 16, pages).rate == pytest.approx(rate, rel=0.03)


def rates(path, concurrency, pages, page_size=16):
    """Hit rates with the same blocks, one of which vLLM reserves: ours, ours with vLLM's policy, the reference's."""
    requests, loop = trace(path), {"concurrency": concurrency, "max_batched_tokens": 8192}
    pool = {"num_pages": pages, "page_size": page_size}
    ours, same = (simulated_hits(requests, as_vllm=as_vllm, **pool, **loop) for as_vllm in (False, True))
    reference = vllm_hits(requests, **pool, **loop)
    assert ours.queried == same.queried == reference.queried
    return ours.rate, same.rate, reference.rate


@pytest.mark.parametrize(("concurrency", "pages"), [(1, 4000), (64, AMPLE), (64, 4000)])
def test_our_hit_rate_is_that_of_vllm(data_file, concurrency, pages):
    ours, same, reference = rates(data_file("prefix_trace.jsonl"), concurrency, pages)
    assert ours == pytest.approx(reference, rel=0.05 if pages < AMPLE else 0)
    assert same == pytest.approx(reference, rel=0.005)


def test_what_differs_in_a_small_pool_is_who_is_admitted(data_file):
    """64 requests wait for a pool half as large again as the longest: what ours admits past them hits more often."""
    ours, same, reference = rates(data_file("prefix_trace_synthetic.jsonl"), 64, 400)
    assert ours > 1.1 * reference
    assert same == pytest.approx(reference, rel=0.005)


@pytest.mark.full
@pytest.mark.parametrize("name", ["prefix_trace.jsonl", "prefix_trace_synthetic.jsonl"])
@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.parametrize("page_size", [1, 8, 16, 32])
@pytest.mark.parametrize("tokens", [16 * AMPLE, 512_000, 256_000, 128_000, 64_000, 32_000, 16_000, 8_000, 4_800])
def test_our_hit_rate_is_that_of_vllm_anywhere(data_file, name, concurrency, page_size, tokens):
    """With vLLM's policy anywhere; with our own from pools of eight times the longest prompt on."""
    ours, same, reference = rates(data_file(name), concurrency, tokens // page_size, page_size)
    assert same == pytest.approx(reference, rel=0.005)
    if tokens >= 32_000:
        assert ours == pytest.approx(reference, rel=0.05)
