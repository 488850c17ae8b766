"""Counters of vLLM from metrics pages of several versions.

`data/vllm/counters-*.txt` are written by the counters' own class of these vLLM versions
(`SpecDecodingProm`, taken from their wheels and run alone with prometheus_client), after 100 drafts
of 3 tokens, of which 60, 24, 10 and 6 had 0, 1, 2 and 3 accepted.
"""

import pytest
from paths import DATA
from refusals import refusal

from sequoia_plan.engines.counters import chain_acceptance, parse

VERSIONS = sorted(DATA.glob("vllm/counters-*.txt"))
PAGE = VERSIONS[-1].read_text()


@pytest.mark.parametrize("page", VERSIONS, ids=[page.stem for page in VERSIONS])
def test_every_version_counts_the_same(page):
    acceptance = chain_acceptance(parse(page.read_text()), str(page))
    assert (acceptance.drafts, acceptance.accepted) == (100, (40, 16, 6))
    assert len(VERSIONS) >= 6


def test_drafts_that_are_looked_up_are_not_in_every_step():
    """A server with ngram: of 300 steps 100 drafted."""
    page = f"{PAGE}vllm:inter_token_latency_seconds_count 300\n"
    assert chain_acceptance(parse(page), "p").drafting_share == pytest.approx(1 / 3, abs=1e-4)


def test_several_engines_add_up_and_labels_may_hold_anything():
    odd_name = r'model_name="a \"b\", position=\"9\"} 3"'
    odd_page = PAGE.replace('engine="0"', 'engine="1"').replace('model_name="target"', odd_name)
    assert chain_acceptance(parse(PAGE + odd_page), "p").accepted == (80, 32, 12)
    assert chain_acceptance(parse(PAGE + odd_page, "target"), "p").accepted == (40, 16, 6)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("", "p: found no counters of speculation"),
        # the counters of vLLM 0.9's first engine, vllm/engine/metrics.py there
        ("vllm:spec_decode_draft_acceptance_rate 0.4\n", "found vllm:spec_decode_draft_acceptance"),
        (PAGE.replace('position="0"', 'position="7"'), "from position 0 on"),
        (PAGE.replace("} 100.0", "} 0.0"), "expected vllm:spec_decode_num_drafts above 0"),
        (
            PAGE.replace("} 16.0", "} 41.0").replace("} 62.0", "} 87.0"),
            "found .40, 41, 6. of 100 drafts",
        ),
    ],
)
def test_pages_that_tell_nothing(page, message):
    assert page != PAGE
    with refusal(message):
        chain_acceptance(parse(page), "p")
