"""The predictions of docs/scale, against sums by hand."""

import numpy as np

from benchmarks import scale

RECORDS = [
    {"config": {"M": num, "median": "512"}, "metrics": {"what": "step", "path": path, "ms": ms}}
    for num, path, ms in ((1000, "fused", 0.1), (2**20, "fused", 500.1), (1000, "plain", 0.01))
]


def test_one_gpu_takes_what_was_measured():
    step = scale.cloud(2**20, 1, scale.measured(RECORDS))
    assert (step.exchange, step.received) == (0, 0)
    np.testing.assert_allclose(step.total, 0.5001)


def test_a_cloud_on_64_gpus():
    """Pairs divided by 64; the cloud twice and 1024 particles for the median, 63/64 of them from others, in 2 x 63 hops."""
    step = scale.cloud(2**19, 64, scale.measured(RECORDS))
    np.testing.assert_allclose(step.compute, 1e-4 + 0.5 / 4 / 64)
    received = 63 / 64 * (2 * 2**19 + 1024) * 2 * 4
    np.testing.assert_allclose(step.exchange, received / 50e9 + 126 * 10e-6)


def test_networks_on_8_and_512_gpus():
    """Three turns of a share of 25.6 GB and the 64 x 64 distances; on 512, eight GPUs add up a network's gradients."""
    eight, many = (scale.networks(64, 10**8, n) for n in (8, 512))
    np.testing.assert_allclose(eight.received, 7 / 8 * (3 * 25.6e9 / 8 + 2 * 64**2 * 4))
    np.testing.assert_allclose(eight.compute, 8 * 1e8 * 6 * 4096 / 4e14 + 12 * 25.6e9 / 8 / 4e12)
    np.testing.assert_allclose(many.received, 63 / 64 * (3 * 25.6e9 / 64 + 2 * 64**2 * 4))
    added = 2 * 7 / 8 * 0.4e9 / 450e9
    np.testing.assert_allclose(many.exchange, many.received / 50e9 + 4 * 63 * 10e-6 + added)


def test_the_tables_have_a_row_for_each_number_of_gpus():
    for table in (scale.clouds_table, scale.networks_table):
        assert [row[0] for row in table(RECORDS)] == ["GPUs", "1", "8", "64", "512"]
    assert len(scale.clouds_table([])) == 1  # nothing was measured
