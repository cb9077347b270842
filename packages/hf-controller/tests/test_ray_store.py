"""References that stay packed until they are read, and rows that live as long as somebody can read them."""

from __future__ import annotations

import gc

import numpy
import ray

from hf_controller.executors.ray.store import RayStore


def test_a_sealed_reference_outlives_the_name_it_was_put_under(ray_executor):
    store = RayStore()
    container = ray.put({"near": store.put([numpy.arange(10**6)]), "far": store.put([numpy.zeros(10**6)])})
    gc.collect()
    received = ray.get(container)
    assert received["near"]._reference is None
    assert store.get([received["near"]], 5.0)[0][0].sum() == sum(range(10**6))
    assert received["far"]._reference is None
