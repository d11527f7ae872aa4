"""The predictions of docs/scale, against sums by hand."""

import numpy as np

from benchmarks import exchange, scale
from experiments import records

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


def test_rings_of_two_devices_share_their_hop():
    """Half of the cloud once for the masses and once for the force, or once for both; and half of the masses."""
    cloud, masses = 400 * 3 * 4, 400 * 4
    by = lambda devices: exchange.expected("w_sgld_b", 400, 3, devices, ring=True)
    assert by(2) == (cloud + masses) / 2
    assert by(4) == 3 / 4 * (2 * cloud + masses)


def test_sizes_stand_beside_the_formulas():
    """The largest difference is that of the sampler farthest off; what should send nothing counts by its bytes."""
    config = {"devices": 4, "way": "ring", "sizes": [[400, 3]]}
    sent = (("sgld", 0.0, 0.0), ("svgd", 100.0, 101.0), ("w_sgld", 200.0, 190.0))
    found = [
        {"config": config, "metrics": {"M": 400.0, "D": 3.0, "sampler": name, "formula": formula, "program": program}}
        for name, formula, program in sent
    ]  # fmt: skip
    assert exchange.sizes_table(found)[1:] == [["ring", "100", "3", "4", "100", "101", "5.00%"]]


GPU = scale.Rates(interacting=2e11, flops=5e13, bytes=4e12, learning=1e14)


def test_rates_are_those_of_the_records():
    """4e8 numbers in 2 ms; a CIFAR-10 network has 43.8 million weights at work for an image, 10 of them saw 128 in 2.5 ms."""
    wide = [
        {"config": {"part": "wide", "M": 16, "D": 25_000_000}, "metrics": {"path": path, "ms": ms}}
        for path, ms in (("fused", 2.0), ("plain", 1.0))
    ]
    machine = {"flops": 5e13, "bytes": 4e12}
    beside = [{"device": "cpu: 2 cores", "machine": {}}, {"device": "gpu: X", "machine": machine}]
    cifar = [
        {"config": {"method": name, "particles": 10, "batch": 128}, "metrics": {"ms": ms}}
        for name, ms in (("Adam", 5.0), ("Adam", 2.5), ("SGD", 1.0))
    ]
    found = scale.rates(wide, beside, cifar)
    assert found is not None
    weights = 1_769_472 + 18_874_368 + 18_874_368 + 4_194_304 + 10_240
    np.testing.assert_allclose(found, (2e11, 5e13, 4e12, 6 * weights * 1280 / 2.5e-3))
    assert scale.rates(wide, beside[:1], cifar) is None


def test_networks_on_8_and_512_gpus():
    """Three turns of a share of 25.6 GB and the 64 x 64 distances; on 512, eight GPUs add up a network's gradients."""
    eight, many = (scale.networks(64, 10**8, n, GPU) for n in (8, 512))
    np.testing.assert_allclose(eight.received, 7 / 8 * (3 * 25.6e9 / 8 + 2 * 64**2 * 4))
    gradient, adam = 8e8 * 6 * 4096 / 1e14, 7 * 25.6e9 / 8 / 4e12
    products = 6 * 64 * 8e8 / 5e13  # longer than 8e8 numbers at 2e11 a second
    np.testing.assert_allclose(eight.compute, gradient + products + adam)
    few = scale.networks(16, 10**8, 8, GPU)
    np.testing.assert_allclose(few.compute, (gradient + adam) / 4 + 2e8 / 2e11)
    np.testing.assert_allclose(many.received, 63 / 64 * (3 * 25.6e9 / 64 + 2 * 64**2 * 4))
    added = 2 * 7 / 8 * 0.4e9 / 450e9
    np.testing.assert_allclose(many.exchange, many.received / 50e9 + 4 * 63 * 10e-6 + added)


def test_the_tables_have_a_row_for_each_number_of_gpus():
    pairs = records.read("pairs")
    for table in (scale.clouds_table, scale.networks_table):
        assert [row[0] for row in table(pairs)] == ["GPUs", "1", "8", "64", "512"]
        assert len(table([])) == 1  # nothing was measured
