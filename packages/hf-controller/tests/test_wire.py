"""Calls as they travel: what stands next to the bytes, and that classes of ours cost a name alone."""

from __future__ import annotations

import gc
import pickle
import time
import weakref

import numpy as np
import pytest
import ray

from hf_controller.data.expressions import Source
from hf_controller.executors.ray.handles import LocalBatchHandle, Sealed, SplitBatchHandle
from hf_controller.executors.ray.wire import pack_call, unpack_call
from hf_controller.groups.call import Call
from hf_protocols import ProtocolError, RowSelection


def call_with(*values):
    return Call(1, "actor", "update", values, kwargs={}, after=(), submit_s=time.time(), timeout_s=60.0, labels={})


def travel(call):
    packed = pack_call(call)
    return packed, unpack_call(packed.packed, packed.references, *packed.batches)


def test_references_travel_next_to_the_bytes_once_each():
    first, second = ray.ObjectRef.from_random(), ray.ObjectRef.from_random()
    sealed = Sealed(ray.ObjectRef.from_random())
    packed, found = travel(call_with([first, second, first], sealed, {"again": (second, sealed)}))
    assert packed.references == [first, second, sealed] and packed.batches == []
    assert not any(each.binary() in packed.packed for each in (first, second))
    assert found.args == ([first, second, first], sealed, {"again": (second, sealed)})


def test_a_batch_of_many_ranks_travels_as_numbers_of_references():
    references = [ray.ObjectRef.from_random() for _ in range(600)]
    halves = zip(references[::2], references[1::2], strict=True)
    source = Source([SplitBatchHandle(metadata=each, contents=other) for each, other in halves], maker="actor.score")
    packed, found = travel(call_with([source, source], references[7]))
    assert packed.references == [*references[::2], *references[1::2]] and packed.batches == []
    one, other = found.args[0]
    assert one is other and one is not source
    assert (one.shards, one.maker, one.call) == (source.shards, "actor.score", None)
    assert found.args[1] == references[7]
    assert len(packed.packed) < 4 * 600 + 500


def test_an_unpacked_call_holds_nothing_once_it_is_dropped():
    references = [ray.ObjectRef.from_random() for _ in range(4)]
    halves = zip(references[::2], references[1::2], strict=True)
    source = Source([SplitBatchHandle(metadata=each, contents=other) for each, other in halves], maker="actor.score")
    packed = pack_call(call_with(source, Sealed(references[0])))
    gc.collect()
    gc.disable()
    try:
        found = unpack_call(packed.packed, packed.references, *packed.batches)
        kept = weakref.ref(found.args[0])
        assert kept() is not None
        del found
        assert kept() is None
    finally:
        gc.enable()


def test_batches_of_this_machine_are_handed_over_as_they_are():
    contents = ray.ObjectRef.from_random()
    packed = pack_call(call_with(LocalBatchHandle(contents), LocalBatchHandle(contents)))
    assert packed.references == [] and packed.batches == [contents]


def test_functions_and_classes_of_a_program_travel_by_value():
    class OwnArgument:
        factor = 3

    factor = 2
    packed, found = travel(call_with(lambda value: factor * value, OwnArgument))
    assert (found.args[0](5), found.args[1].factor) == (10, 3)
    assert b"factor" in packed.packed


@pytest.mark.parametrize("rows", [range(0, 4000, 3), np.random.default_rng(0).permutation(4000)[:1000].tolist()])
def test_rows_take_four_bytes_each_and_nothing_of_their_class(rows):
    selection = RowSelection.from_rows(rows)
    packed, found = travel(call_with(selection, ray.ObjectRef.from_random()))
    assert found.args[0] == selection
    most = 4 * len(selection) + 1000
    assert len(pickle.dumps(selection)) < most and len(packed.packed) < most


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(ProtocolError, match=r"actor\.update: the argument number 2, a generator, cannot travel"):
        pack_call(call_with([1], (each for each in ())))
