"""How threads of a pass share its work, and the parts of a head that each may compute."""

import numpy as np
import pytest

from sequoia_plan.models.offload.weight_file import Place, place_blocks
from sequoia_plan.models.packed.formats import num_tiles, tile_bytes
from sequoia_plan.models.packed.packed_pass import Workers
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.models.packed.tiles import aligned_zeros
from sequoia_plan.models.packed.weights import HEAD, PackedWeights, describe
from sequoia_plan.models.packed.workers import COUNTER_WORDS, take, wait


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 48, 63, 280, 4748])
def test_what_workers_take_is_all_there_is(count, workers):
    """Each thing once, in ascending order; nobody's first share is more than half of its part."""
    counter = aligned_zeros((COUNTER_WORDS,), np.int64)
    shares = []
    while not shares or shares[-1][0] < count:
        shares.append(take(counter.ctypes.data, workers, count))
    parts = [np.arange(*share) for share in shares]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(count))
    assert len(parts[0]) == -(-count // (2 * workers))


@compiled
def count_things(worker, workers, counter, taken, num_rounds, waits):
    """In each round, all things are taken once more."""
    rounds = np.int64(1)
    for _ in range(num_rounds):
        first, end = take(counter, workers, taken.size)
        while first < taken.size:
            for thing in range(first, end):
                taken[thing] += 1
            first, end = take(counter, workers, taken.size)
        if waits:
            rounds = wait(counter, workers, rounds)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_begin_a_round_when_all_have_ended_the_one_before(workers):
    """The control does not wait: then nobody sets the counter back, and one round is all."""
    threads = Workers(workers)
    for waits, expected in ((True, 200), (False, 1), (True, 200)):
        taken = np.zeros(37, np.int64)
        threads.run(count_things, taken, 200, waits)
        np.testing.assert_array_equal(taken, expected)


def test_the_last_part_of_a_head_ends_at_its_outputs():
    """Its memory ends with a page, where another tile has room that is not the head's."""
    outputs, width, format = 2000, 64, "Q8_0"
    size = tile_bytes(8, width)
    head = Place("uint8", (num_tiles(outputs), size), format=format, outputs=outputs, inputs=width)
    small = Place("float32", (width,))
    blocks = place_blocks([{"first": small}, {"layer": small}, {HEAD: head}])
    memories = [aligned_zeros((block.size,)) for block in blocks]
    parts = PackedWeights(blocks, memories).head_parts()
    assert [part.outputs for part in parts] == [1024, 976]
    assert [len(part.tiles) for part in parts] == [32, 31]
    assert len(memories[-1]) // size == 32  # the control: what has room
    assert sum(int(describe(part)[3]) for part in parts) == num_tiles(outputs)
