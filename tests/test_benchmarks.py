"""The benchmarks time what they say: every entrant against NumPy in float64, its process, and the table."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import particlax as px
from benchmarks import __main__ as command
from benchmarks import (
    anatomy,
    beside,
    clouds,
    compiling,
    curves,
    logistic,
    machine,
    pairs,
    peer,
    rounds,
    timing,
)
from benchmarks.entrants import ENTRANTS, OURS, Work
from experiments import config, covertype, records, tables
from experiments.registry import STUDIES
from experiments.study import perform
from particlax import algorithms

COMPILE_FAST = True

TINY = logistic.Config(**{**logistic.STUDY.smoke, "rounds": 2, "turn": 0.01})


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """A place of its own for records."""
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(STUDIES, "steptime", logistic.STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def some_work(num=40, batch=40, particles=12, dim=3, rate=0.3):
    """A regression on few rows; with all of them in a batch, their order does not matter."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(num, dim)).astype(np.float32)
    y = (rng.uniform(size=num) < 0.4).astype(np.float32)
    start = rng.normal(0.3, 0.8, size=(particles, dim + 1)).astype(np.float32)
    return Work(x, y, start, batch, rate)


# --------------------------------------------------------------------- every entrant against NumPy in float64


def score(theta, x, y, num):
    if not num:
        return -theta
    w, alpha = theta[:-1], np.exp(theta[-1])
    rows = (y - 1 / (1 + np.exp(-(x @ w)))) @ x
    slope = 0.5 * len(w) + covertype.SHAPE - alpha * (0.5 * w @ w + covertype.RATE)
    return np.append(num / len(y) * rows - alpha * w, slope)


def squares(theta, diagonal):
    """Squared differences by coordinate, of distinct pairs or of all."""
    num = len(theta)
    pairs = [(i, j) for i in range(num) for j in range(num if diagonal else i)]
    return np.array([(theta[i] - theta[j]) ** 2 for i, j in pairs])


def distinct(theta):
    """h = med^2 / log M, over distinct pairs."""
    return np.median(np.sqrt(squares(theta, False).sum(1))) ** 2 / np.log(len(theta))


def distinct_squares(theta):
    """The same with the median of the squares."""
    return np.median(squares(theta, False).sum(1)) / np.log(len(theta))


def everything(theta):
    """h = med^2 / log M, over all pairs, a particle with itself among them."""
    return np.median(np.sqrt(squares(theta, True).sum(1))) ** 2 / np.log(len(theta))


def by_coordinate(theta):
    """A lower median of squares for every coordinate, / log(M + 1)."""
    ordered = np.sort(squares(theta, False), 0)
    return ordered[(len(ordered) - 1) // 2] / np.log(len(theta) + 1)


RULES = {
    "particlax": distinct,
    "particlax (lax.scan)": distinct,
    "BlackJAX": distinct,
    "NumPyro": everything,
    "Pyro": by_coordinate,
    "NumPy": distinct_squares,
}


def reference(work, rule, steps):
    """Steps of SVGD with Adagrad, pair by pair."""
    theta, total = work.start.astype(float), np.full(work.start.shape, 0.1)
    for step in range(steps):
        rows = work.rows(step)
        h = rule(theta)
        slopes = [score(t, work.x[rows], work.y[rows], len(work.y)) for t in theta]
        move = np.zeros_like(theta)
        for i, here in enumerate(theta):
            for there, slope in zip(theta, slopes, strict=True):
                k = np.exp(-np.sum((here - there) ** 2 / h))
                move[i] += k * (slope + 2 * (here - there) / h) / len(theta)
        total += move**2
        theta = theta + work.rate * move / np.sqrt(total + 1e-7)
    return theta


def sampler(name, work):
    """An entrant, if its package is there."""
    for package in ENTRANTS[name].packages:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"{package} is not installed: {ENTRANTS[name].install}")
    return ENTRANTS[name].prepare(work)


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("name", ENTRANTS)
def test_steps_are_those_of_svgd(name):
    """Taken in two goes; all rows in every batch."""
    work = some_work()
    found = sampler(name, work)
    np.testing.assert_array_equal(found.particles(), work.start)
    found.advance(1)
    np.testing.assert_allclose(found.particles(), reference(work, RULES[name], 1), atol=2e-5)
    found.advance(3)
    np.testing.assert_allclose(found.particles(), reference(work, RULES[name], 4), atol=2e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ENTRANTS if name != OURS])
def test_batches_follow_the_rows(name):
    """And begin anew after the last full one; px.run draws its own."""
    work = some_work(batch=15)
    assert [work.rows(step).start for step in range(3)] == [0, 15, 0]
    found = sampler(name, work)
    found.advance(2)
    found.advance(1)
    np.testing.assert_allclose(found.particles(), reference(work, RULES[name], 3), atol=2e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENTRANTS)
def test_a_normal_needs_no_data(name):
    work = clouds.work_of(clouds.Config(adagrad=0.3), 12, 0)
    found = sampler(name, work)
    found.advance(1)
    found.advance(2)
    np.testing.assert_allclose(found.particles(), reference(work, RULES[name], 3), atol=2e-4)


# -------------------------------------------------------------------------------------- processes and turns


@pytest.fixture
def path(tmp_path):
    some_work().save(tmp_path / "work.npz")
    return tmp_path / "work.npz"


def test_the_work_survives_its_file(path):
    for ours, theirs in zip(some_work(), Work.load(path), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert type(ours) is type(theirs)


def test_a_worker_answers_in_json_lines(path):
    """Nothing else is on its standard output, whatever is printed."""
    noisy = (
        "import os, sys; from pathlib import Path; from benchmarks import worker; "
        "prepare = worker.ENTRANTS['NumPy'].prepare; "
        "loud = lambda work: (print('hear me'), os.write(1, b'and me'), prepare(work))[-1]; "
        "worker.ENTRANTS['NumPy'] = worker.ENTRANTS['NumPy']._replace(prepare=loud); "
        f"worker.main('NumPy', Path({str(path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", noisy],
        input='{"steps": 3}\n{}\n',
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(records.ROOT)},
    )
    hello, took, there = map(json.loads, done.stdout.splitlines())
    assert hello["versions"] == {"numpy": np.__version__}
    assert 0 < took["seconds"] < 1
    np.testing.assert_allclose(
        there["particles"], reference(some_work(), distinct_squares, 3), atol=2e-4
    )
    assert 0 < there["bytes"] < 2**30
    assert "hear me" in done.stderr
    assert "and me" in done.stderr


def test_turns_are_taken_one_by_one(monkeypatch):
    """Every worker once a round, every second round backwards, seconds over steps."""
    order = []

    class Fake:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def answer(self):
            return {"seconds": 1.0, "versions": {}}

        def advance(self, steps):
            order.append(self.name)
            return self.seconds * steps

    monkeypatch.setattr(rounds, "PAUSE", 0)
    workers = [Fake("a", 0.001), Fake("b", 0.01), Fake("c", 0.1)]
    paces = [rounds.warm(worker, 0.5, 10) for worker in workers]
    assert [pace.steps for pace in paces] == [500, 50, 10]
    assert paces[1].startup == pytest.approx(1.1)
    order.clear()
    seconds = rounds.timed(workers, paces, 3)
    assert "".join(order) == "abccbaabc"
    np.testing.assert_allclose(seconds, [[0.001, 0.01, 0.1]] * 3)


def test_a_call_that_compiled_sets_no_pace():
    """Another number of steps may be another program: what its first call takes says nothing of a turn."""

    class Compiles:
        def __init__(self):
            self.known, self.asked = set(), []

        def answer(self):
            return {"seconds": 1.0, "versions": {}}

        def advance(self, steps):
            self.asked.append(steps)
            first = steps not in self.known
            self.known.add(steps)
            return 0.01 + 0.0002 * steps + 2.0 * first

    worker = Compiles()
    pace = rounds.warm(worker, 0.5, 1)
    assert 0.4 < 0.01 + 0.0002 * pace.steps < 0.6
    assert pace.steps % 10 == 0  # as people choose them: px.run takes a few together where it can
    assert worker.asked[-2:] == [pace.steps] * 2


def test_a_worker_that_dies_says_why(tmp_path):
    with (
        rounds.started("NumPy", tmp_path / "nowhere.npz") as worker,
        pytest.raises(rounds.WorkerError, match=r"ended: FileNotFoundError.*nowhere\.npz"),
    ):
        worker.answer()


# ------------------------------------------------------------------------------------------------ the study


def test_a_pass_and_a_missing_package(sandbox, monkeypatch, capsys):
    """A package that is not there has a row that says what to install; numbers of the others are whole."""
    (sandbox / "blackjax.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(sandbox))  # before the installed packages
    command.main([
        "steptime", "--smoke", "--rounds=2", "--turn=0.01", "--entrants=particlax,BlackJAX,NumPy",
    ])  # fmt: skip
    found = records.read("steptime", "smoke")
    ours, missing, plain = found
    assert missing["metrics"] == {"entrant": "BlackJAX"}
    assert missing["notes"] == "no such thing: pip install blackjax"
    assert ours["metrics"]["ratio"] == ours["metrics"]["ratio_high"] == 1
    for entry in (ours, plain):
        seen = entry["metrics"]
        assert seen["accuracy"] > 0.7
        assert seen["ms"] > 0
        assert seen["steps"] >= 10 * (2 + 2)
        assert 0 < seen["limit"] < 1
        assert seen["mib"] > 0
        assert set(entry["machine"]) == {"flops", "bytes", "exps"}
        assert entry["device"].endswith("cores")
    rows = logistic.table(found)
    assert len({len(row) for row in rows}) == 1
    assert len({row[0] for row in rows[1:]}) == 1
    assert rows[1][1].startswith("particlax ")
    assert rows[2][1:4] == ["BlackJAX", "no such thing: pip install blackjax", "-"]
    assert rows[3][1] == f"NumPy {np.__version__}"
    assert "all packages in one pass" in capsys.readouterr().out
    console = Console(quiet=True)
    settings = logistic.Config(**{
        **logistic.STUDY.smoke, "rounds": 2, "turn": 0.01, "entrants": (OURS, "BlackJAX", "NumPy"),
    })  # fmt: skip
    assert perform(logistic.STUDY, settings, "smoke", console) == found  # nothing is run again


def test_our_own_failure_is_one(monkeypatch):
    def fails(worker, turn, steps):
        raise rounds.WorkerError("ended")

    monkeypatch.setattr(rounds, "warm", fails)
    with pytest.raises(rounds.WorkerError):
        list(logistic.one_pass(TINY, 0))


def test_ratios_are_taken_within_rounds():
    """A machine that is slow in some rounds is slow for all: the ratio does not see it."""
    mood = np.array([1.0, 5.0, 1.0, 2.0, 9.0])
    found = timing.times(0.003 * mood, 0.001 * mood)
    assert found["ms"] == pytest.approx(6.0)
    assert [found[key] for key in ("ratio_low", "ratio", "ratio_high")] == pytest.approx([3.0] * 3)


def test_the_start_is_covertypes():
    split = covertype.problem("synthetic", 2)
    work = logistic.work_of(TINY, split, 2)
    start = covertype.start(jax.random.key(2), TINY.particles, split.dim)
    np.testing.assert_array_equal(work.start[:, :-1], start["w"])
    np.testing.assert_array_equal(work.start[:, -1], start["log_alpha"])
    assert work.start.dtype == work.x.dtype == np.float32
    assert len(work.y) == split.num_data


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--entrants=particlax,Blackjax", "did you mean BlackJAX?"),
        ("--entrants=particlax,Stan", "There are: particlax, "),
        ("--entrants=NumPy", "to which the others are compared"),
        ("--round=3", "did you mean --rounds?"),
        ("--data=else", "expected covertype or synthetic"),
    ],
)
def test_bad_settings_end_with_a_message(sandbox, argument, words):
    with pytest.raises(SystemExit) as caught:
        command.main(["steptime", argument, "--record=x"])
    assert words in str(caught.value)


def test_the_command_runs_all_studies_or_one(monkeypatch):
    asked = []
    monkeypatch.setattr(
        command, "run", lambda name, arguments, console: asked.append((name, arguments))
    )
    command.main(["--smoke"])
    assert asked == [(name, ["--smoke"]) for name in ("clouds", "steptime", "interaction")]
    asked.clear()
    command.main(["clouds", "--rounds=3"])
    assert asked == [("clouds", ["--rounds=3"])]
    with pytest.raises(SystemExit, match="python -m benchmarks NAME"):
        command.main(["--help"])


# ------------------------------------------------------------------------------------- limits of the machine


def test_the_scarcest_resource_is_the_limit():
    need = machine.Need(flops=10.0, bytes=60.0, exps=2.0)
    assert need.seconds(machine.Limits(flops=10.0, bytes=20.0, exps=4.0)) == 3.0


def test_needs_follow_the_formulas():
    """Counted one by one."""
    assert machine.svgd(3, 2) == (9 * (2 * 3 + 2 * 4), 0, 9)
    found = machine.regression(3, 5, 4)
    assert found == (2 * 2 * 3 * 4 * 5 + 9 * 5 * 7, 0, 3 * 4 + 9)
    flops = bytes_ = 0
    for i, (a, b) in enumerate([(7, 4), (4, 2)]):
        products = (
            2 if i == 0 else 3
        )  # forward, by the weights, and by the inputs where these are not data
        flops += products * 2 * 6 * a * b
        bytes_ += (6 + 4) * 4 * (a * b + b)
    assert machine.networks(5, (7, 4, 2), 6, passes=4) == (5 * flops, 5 * bytes_, 0)


def test_the_probe_gives_rates():
    found = machine.measured(small=True)
    assert all(1e6 < rate < 1e16 for rate in found)
    assert set(found.rounded()) == {"flops", "bytes", "exps"}


def test_a_gpu_runs_those_that_can(monkeypatch):
    """The others have a row that says so; nobody is told to use the CPU."""
    asked = []

    class Fake:
        steps = 3

        def particles(self):
            return np.zeros((4, 2), np.float32), 2**20

    def started(name, path, device, threads):
        asked.append((name, device))
        return contextlib.nullcontext(Fake())

    def timed(workers, paces, rounds):
        return np.ones((rounds, len(workers)))

    monkeypatch.setattr(beside.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(beside.machine, "measured", lambda small: machine.Limits(1.0, 1.0, 1e3))
    monkeypatch.setattr(rounds, "started", started)
    monkeypatch.setattr(
        rounds, "warm", lambda worker, turn, steps: rounds.Pace(1.0, 2, {"jax": "1"})
    )
    monkeypatch.setattr(rounds, "timed", timed)
    settings = clouds.Config(rounds=2, entrants=(OURS, "NumPyro", "NumPy"))
    ours, _, plain = clouds.one_pass(settings, 20, 0)
    assert asked == [(OURS, "gpu"), ("NumPyro", "gpu")]
    assert ours.metrics["mib"] == 1
    assert ours.metrics["limit"] == pytest.approx(7 * 2 * 400)
    assert plain.metrics == {"entrant": "NumPy"}
    assert plain.extra == {"notes": "runs on a CPU alone"}
    assert "device" not in ours.extra  # JAX names it
    assert len(list(clouds.one_pass(settings, 5000, 0))) == 2  # NumPyro is left out


def test_pairs_times_what_there_is(monkeypatch):
    """Here plain XLA alone; where a kernel is possible, both."""
    smoke = dataclasses.replace(pairs.Config(), **pairs.STUDY.smoke | {"only": ("median",)})
    (run,) = pairs.runs(smoke)
    (seen,) = (seen.metrics for seen in run.work())
    assert seen["path"] == "plain" and seen["error"] < 1e-5 and seen["ms"] > 0
    entry = lambda device, m: {"config": run.settings, "device": device, "metrics": m}
    found = [
        entry("cpu", seen),
        entry("gpu", seen),
        entry("gpu", seen | {"path": "fused", "ms": 0.5}),
    ]
    rows = pairs.table(found)
    assert [row[:4] for row in rows[1:]] == [[d, "median", "300", "2"] for d in ("cpu", "gpu")]
    assert rows[1][4] == "-" and rows[2][4] == "0.5" and rows[2][5] == rows[1][5]
    monkeypatch.setattr(pairs.gpu, "possible", lambda: True)
    assert pairs.paths(100, 200) == ["fused", "plain"] and pairs.paths(300, 200) == ["fused"]
    with pytest.raises(config.ConfigError, match="expected some of step, median"):
        list(pairs.runs(dataclasses.replace(smoke, only=("medians",))))


# ------------------------------------------------------------------------------------------------- compiling


def test_every_sampler_is_compiled():
    """Those of `px.algorithms`, each at least once."""
    timed = {name.partition(",")[0] for name in compiling.SAMPLERS}
    assert timed == set(algorithms.__all__)
    assert all(isinstance(make(), px.Flow) for make in compiling.SAMPLERS.values())


def test_compiling_takes_time():
    assert 0 < compiling.first_call("sgld", 10) < 60


# ---------------------------------------------------------------------------------------------------- curves


def test_exponents_are_slopes_of_the_upper_half():
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert curves.exponent(sizes, np.maximum(3 * sizes**2, 100)) == pytest.approx(2)
    assert curves.exponent(sizes[:2], 5 * sizes[:2] ** 0.5) == pytest.approx(0.5)


def test_curves_end_where_they_would_take_too_long(monkeypatch):
    monkeypatch.setattr(curves, "measured", lambda what, num, dim, turn: (1e-6 * num**2, 8 * num * dim))  # fmt: skip
    settings = curves.Config(least=10, dims=20, most=0.1, mebibytes=1)
    found = [seen.metrics for seen in curves.line(settings, "stein", "M")]
    assert [seen["M"] for seen in found] == [10, 20, 40, 80, 160]
    found = [seen.metrics for seen in curves.line(settings, "stein", "D")]
    assert found[0]["D"] == 2 and found[-1]["bytes"] > 2**18 > found[-2]["bytes"]


def test_a_figure_of_the_docs_is_drawn_with_its_table(sandbox, monkeypatch):
    entries = [
        records.record("curves", {"what": what, "against": against, "dims": 32}, 0, seconds=1.0, metrics={"M": n, "D": n, "seconds": n**2, "bytes": n})
        for what in curves.WHATS for against in ("M", "D") for n in (2, 4, 8)
    ]  # fmt: skip
    page = sandbox / "docs" / "page.md"
    (sandbox / "docs" / "images").mkdir(parents=True)
    page.write_text("<!-- figure: curves -->\n<!-- end -->\n<!-- table: curves -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "pages", lambda: [page])
    monkeypatch.setattr(records, "ROOT", sandbox)
    tables.main(check=False)
    assert "![" not in page.read_text()  # there are no records yet
    records.Ledger(records.home("curves", records.STUDY)).add(entries)
    tables.main(check=False)
    assert "![Cost against the number of particles and the dimension](images/curves.png)" in page.read_text()  # fmt: skip
    assert "| 2.00 |" in page.read_text()
    assert (sandbox / "docs" / "images" / "curves.png").exists()
    tables.main(check=True)


def test_kernels_by_what_they_do():
    kernels = {"_mix_body": 50.0, "_distance_body": 20.0, "gemm_fusion_dot_4": 30.0, "loop_add_fusion": 31.0, "sort_8": 4.0, "loop_x": 1.0}  # fmt: skip
    found = anatomy.shares(anatomy.Profile(kernels, 12, 7.5))
    assert found == {"distances": 20, "mixing": 50, "products": 30, "passes": 31, "small": 5, "idle": 7.5, "launches": 12}  # fmt: skip


def test_profiles_see_what_runs():
    """The product of two matrices is most of the time of a function that does little else."""
    x = jnp.ones((400, 400)) / 400
    many = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    found = anatomy.profiled(lambda: many(x), 20)
    products = anatomy.shares(found)["products"]
    assert products > 0.5 * sum(found.kernels.values()) > 1
    assert found.launches >= 1 and found.idle >= 0


# ------------------------------------------------------------------------------ an entrant of another harness

HARNESS = Path(__file__).resolve().parent.parent.parent / "shared" / "bench"


@pytest.mark.parametrize("kind", ["check", "toy2d:U1@300"])
def test_entrant_of_another_harness(kind, tmp_path):
    """As that harness runs it: in a fresh process, the direction beside its own float64 reference."""
    if not HARNESS.exists():
        pytest.skip(f"there is no harness in {HARNESS}")
    copy = shutil.copytree(HARNESS, tmp_path / "bench", copy_function=shutil.copyfile)
    shutil.copyfile(peer.__file__, copy / "peers" / "particlax_peer.py")
    command = [sys.executable, "run.py", "--worker", "particlax_peer", kind, "cpu", "out.json"]
    places = os.pathsep.join([str(records.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    budget = {"BENCH_BUDGET_S": "0.2", "BENCH_QUALITY_S": "30"}
    subprocess.run(command, cwd=copy, check=True, env=os.environ | budget | {"PYTHONPATH": places})
    found = json.loads((copy / "out.json").read_text())
    assert found["ok"], found
    if kind != "check":
        assert found["quality"]["mmd2"] < 3 * found["quality"]["iid_mmd2"]
        return
    row = ["import json, run", "found = json.load(open('out.json')) | {'peer': 'particlax'}"]
    said = subprocess.run(
        [sys.executable, "-c", "; ".join([*row, "print(run.check_row(found))"])],
        cwd=copy, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    _, name, rule, error, *_ = said.split("|")
    assert (name.strip(), rule.strip()) == ("particlax", "offdiag_logM") and float(error) < 2e-6


def test_shares_of_a_log_density_add_up():
    logp = lambda theta, batch: jnp.sum(batch[0] @ theta) - jnp.sum(theta**2)
    target = peer.target_of(SimpleNamespace(logp=logp), 6)
    theta, rows = jnp.array([0.3, -1.2]), (jnp.arange(12.0).reshape(6, 2),)
    np.testing.assert_allclose(target(theta, rows), logp(theta, rows), rtol=1e-6)


def test_what_another_harness_asks_for():
    kinds = [{"kind": "blr"}, {"kind": "bnn", "mode": "svgd"}, {"kind": "bnn", "mode": "sghmc"}, {"kind": "machine"}]  # fmt: skip
    assert [peer.supports(w) for w in kinds] == [True, True, False, False]
