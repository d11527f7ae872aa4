"""The experiments run at a tiny size, and what is written from records is up to date."""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments import __main__ as command
from experiments import (
    config,
    few,
    logistic,
    logistic_tables,
    records,
    reference,
    sensitivity,
    soak,
    study,
    tables,
    toy,
)
from experiments.registry import STUDIES
from experiments.study import Evaluation, Run, Study, Table, perform

COMPILE_FAST = True


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """A place of its own for records, figures and reports."""
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as COMPILE_FAST, in other processes
    return tmp_path


def needs(name):
    if name == "reference" and not os.environ.get("PARTICLAX_POSTERIORDB"):
        pytest.skip("PARTICLAX_POSTERIORDB does not name the folder of the posteriors")


# ------------------------------------------------------------------------------------ every experiment


@pytest.mark.parametrize("name", STUDIES)
def test_smoke(name, sandbox, capsys):
    """Every study runs, is tabulated, drawn and reported from its records alone."""
    needs(name)
    command.main(["run", name, "--smoke"])
    found = records.read(name, "smoke")
    assert found
    printed = " ".join(capsys.readouterr().out.split())
    made = {table.title: table.rows(found) for table in STUDIES[name].tables.values()}
    assert max(len(rows) for rows in made.values()) > 1
    for title, rows in made.items():
        assert len({len(row) for row in rows}) == 1
        assert (title in printed) == (len(rows) > 1)
    for entry in found:
        assert set(entry) >= {
            "experiment", "config", "seed", "revision", "versions", "device", "metrics", "seconds",
        }  # fmt: skip
    if STUDIES[name].figures:
        command.main(["figure", name, "--record=smoke"])
        assert all((sandbox / "out/smoke" / f"{f}.png").exists() for f in STUDIES[name].figures)
    command.main(["report", "--record=smoke"])
    page = (sandbox / "out/report-smoke.html").read_text()
    assert page.count("data:image/png;base64,") == len(STUDIES[name].figures)
    assert STUDIES[name].paper.replace("'", "&#x27;") in page
    assert "http" not in page.replace("http-equiv", "")  # self-contained
    assert page.count("Not run yet") == len(STUDIES) - 1


# ------------------------------------------------------------------------------- records and resumption


@dataclasses.dataclass(frozen=True)
class Settings:
    seeds: int = 3
    fail_at: int = -1


def counting(done):
    """A study that notes which seeds it does, two evaluations each, and may fail at one."""

    def work(c, seed):
        for step in (1, 2):
            if seed == c.fail_at:
                raise KeyboardInterrupt
            yield Evaluation({"step": step, "value": 10 * seed + step}, 0.5 * step)
        done.append(seed)

    def runs(c):
        for seed in range(c.seeds):
            yield Run({"method": "a"}, seed, lambda s=seed: work(c, s))

    rows = lambda found: [["seed"], *([str(r["seed"])] for r in found)]
    return Study("counting", "t", "p", "1 s", Settings, runs, {"t": Table("t", rows)})


def test_an_interrupted_study_goes_on_where_it_was(sandbox, capsys, monkeypatch):
    done = []
    monkeypatch.setitem(command.STUDIES, "counting", counting(done))
    with pytest.raises(SystemExit) as caught:
        command.main(["run", "counting", "--fail_at=1", "--record=x"])
    assert caught.value.code == 130
    assert "goes on with the others" in capsys.readouterr().out
    assert done == [0]
    command.main(["run", "counting", "--record=x"])
    assert done == [0, 1, 2]
    assert "1 of 3 runs are in" in capsys.readouterr().out
    command.main(["run", "counting", "--record=x"])
    assert done == [0, 1, 2]
    assert "another --record=" in capsys.readouterr().out.replace("\n", " ")
    values = [r["metrics"]["value"] for r in records.read("counting", "x")]
    assert values == [1, 2, 11, 12, 21, 22]


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_long_runs_say_what_they_measure_on_the_way(sandbox, capsys, monkeypatch, patience):
    monkeypatch.setattr(study, "QUIET", patience)

    def runs(c):
        yield Run({"width": 3}, 0, lambda: (Evaluation({"error": k}, 1.0) for k in range(3)))

    slow = Study("slow", "", "", "", type(None), runs, {})
    found = perform(slow, None, "smoke", Console(width=100))
    printed = capsys.readouterr().out
    assert [entry["metrics"]["error"] for entry in found] == [0, 1, 2]
    assert printed.count("on the way") == (0 if patience else 3)
    assert "error 2" in printed


@pytest.mark.parametrize("lines", [0, 1])
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_torn_file_loses_only_the_last_run(sandbox, lines, cut):
    """Whatever a crash leaves of the last run, it is done again and nothing else is."""
    done = []
    study, console = counting(done), Console(quiet=True)
    perform(study, Settings(seeds=2), "x", console)
    path = records.home("counting", "x")
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[: 4 - lines])
    path.write_bytes(kept[: len(kept) - cut])
    done.clear()
    perform(study, Settings(seeds=2), "x", console)
    assert done == ([1] if lines or cut > 1 else [])
    perform(study, Settings(seeds=3), "x", console)
    assert len(path.read_text().splitlines()) == 6
    assert [json.loads(line)["metrics"] for line in path.read_text().splitlines()[:4]] == [
        json.loads(line)["metrics"] for line in whole.decode().splitlines()
    ]


@pytest.mark.parametrize("torn", ['{"exp', '{"exp\n', "\n"])
def test_a_first_record_that_was_torn_does_no_harm(sandbox, torn):
    path = records.home("counting", "x")
    path.parent.mkdir(parents=True)
    path.write_text(torn)
    perform(counting([]), Settings(), "x", Console(quiet=True))
    assert len(records.read("counting", "x")) == 6


def test_a_damaged_line_is_named(sandbox):
    study = counting([])
    perform(study, Settings(), "x", Console(quiet=True))
    path = records.home("counting", "x")
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:50]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit, match="line 2 is not a record"):
        perform(study, Settings(), "x", Console(quiet=True))


def test_where_records_go(sandbox, monkeypatch, capsys):
    """Default settings make the study, others a trial, unless a name is given."""
    monkeypatch.setitem(command.STUDIES, "counting", counting([]))
    for arguments, name in (([], "study"), (["--seeds=1"], "trial"), (["--record=mine"], "mine")):
        command.main(["run", "counting", *arguments])
        assert records.home("counting", name).exists()
    assert {p.name for p in (records.RESULTS / "counting").iterdir()} == {
        "study.jsonl", "trial.jsonl", "mine.jsonl",
    }  # fmt: skip


def test_packed_points_round_trip():
    points = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    packed = json.loads(json.dumps(records.pack(points)))
    np.testing.assert_allclose(records.unpack(packed), points, atol=2e-3)


def test_a_record_is_plain():
    metrics = {"W2": jnp.array(0.12345678), "shares": np.array([1.0, 2.0])}
    entry = records.record("some", {"a": 1}, 3, metrics=metrics, seconds=1.23456)
    assert json.loads(json.dumps(entry)) == entry
    assert entry["metrics"] == {"W2": 0.123457, "shares": [1.0, 2.0]}


# ------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "python -m experiments list"),
        (["run"], "python -m experiments list"),
        (["run", "toyy"], "did you mean toy?"),
        (["run", "toy", "--step=3"], "did you mean --steps"),
        (["run", "toy", "--steps=many"], "expected int"),
        (["run", "toy", "--steps=3", "--steps=4"], "given twice"),
        (["run", "toy", "steps=3"], "unknown setting"),
        (["run", "reference", "--peers=maybe"], "expected true or false"),
        (["run", "sensitivity", "--gammas=1,two"], "expected float"),
        (["run", "toy", "--help"], "--particles=2000"),
        (["run", "sensitivity", "--help"], "--particles=1,2,5,10"),
        (["run", "logistic", "--smoke", "--data=else"], "expected covertype or synthetic"),
        (["table", "toy", "--record=nowhere"], "python -m experiments run toy"),
        (["figure", "reference"], "python -m experiments table reference"),
        (["run", "few", "--targets=Gauss"], "the targets are"),
        (["run", "few", "--samplers=nuts"], "the samplers are"),
        (["run", "mnist", "--methods=SVGD; HMC"], "no method 'HMC'; the methods are: SGD"),
        (["run", "repeat", "--ways=other"], "no way 'other'; the ways are: default"),
        (["run", "repeat-time", "--works=other"], "no work 'other'; the works are: networks"),
    ],
)
def test_bad_commands_end_with_a_message(arguments, words, monkeypatch):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert words in str(caught.value)


def test_list_names_every_study(capsys):
    command.main(["list"])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in STUDIES)


def test_settings_are_typed():
    settings = config.parse(sensitivity.Config, ["--steps=7", "--gammas=0,1e3", "--particles=4"])
    assert (settings.steps, settings.gammas, settings.particles) == (7, (0.0, 1000.0), (4,))
    assert config.parse(reference.Config, ["--peers"]).peers is True


def test_tables_in_the_docs_come_from_the_records():
    tables.main(check=True)


def test_the_committed_study_shows_what_the_readme_says():
    """Mean of the seeds: three samplers find every mode within 30 % and beat the SGLD chain in W2."""
    found = records.read("toy")
    if not found:
        pytest.skip("no committed records of the toy study")
    for density in toy.DENSITIES:
        rows = {row[0]: row for row in toy.table(found, 2000, density)[1:]}
        chain = float(rows["SGLD"][1].split()[0])
        for sampler in ("w-SGLD-B", "SVGD", "pi-SGLD"):
            assert float(rows[sampler][1].split()[0]) < chain
            assert all(0.7 < float(share) < 1.3 for share in rows[sampler][5].split())


def test_few_particles_are_refused_where_the_metric_needs_more():
    settings = few.Config(steps=3, targets="Student t, D = 10", particles=(8,))
    found = {(r.settings["sampler"], r.settings["treatment"]): r.work for r in few.runs(settings)}
    (seen,) = found["svgd", "Ensemble"]()
    assert seen.extra == {"failed": "needs more particles"}
    (seen,) = found["svgd", "plain"]()
    assert seen.metrics["variance"] > 0


def test_measures_of_a_known_cloud():
    problem = few.gaussian(3, 10)
    root = np.linalg.cholesky(problem.covariance)
    white = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 4)))[0]
    white = white - white.mean(0)
    white = np.linalg.qr(white)[0][:, :3] * np.sqrt(20)
    cloud = problem.mean + 1.5 * white @ root.T
    seen = few.measures(jnp.asarray(cloud, jnp.float32), problem)
    assert seen["mean"] < 1e-5
    assert abs(seen["covariance"] - 1.25) < 1e-4
    assert abs(seen["variance"] - 2.25) < 1e-4
    assert abs(seen["smallest sd"] - 1.5) < 1e-4


def test_the_reference_study_needs_its_folder(monkeypatch):
    monkeypatch.delenv("PARTICLAX_POSTERIORDB", raising=False)
    with pytest.raises(SystemExit, match="PARTICLAX_POSTERIORDB"):
        list(reference.runs(reference.Config()))


def test_the_committed_records_show_what_the_docs_say():
    """Ours is right in every run and faster than NUTS in all; the safeguard is what choose.md says."""
    found = records.read("reference")
    ours = [r for r in found if r["config"]["sampler"] == reference.OURS]
    assert len(ours) == 24
    for entry in ours:
        assert entry["metrics"]["mean"] < 0.1
        assert 0.9 < entry["metrics"]["sd"] < 1.1
        assert entry["seconds"] < 30
        assert entry["notes"] == "converged"
    seconds = {name: 0.0 for name in ("NumPyro NUTS", reference.OURS)}
    for entry in found:
        if entry["config"]["sampler"] in seconds:
            seconds[entry["config"]["sampler"]] += entry["seconds"]
    assert seconds[reference.OURS] < seconds["NumPyro NUTS"]
    study = records.read("few")
    for name in ("Gaussian, D = 10", "Gaussian, D = 10, condition 1e6", "Gaussian, D = 50"):
        entry = few.pick(study, ("w_sgld_b", "safeguarded"), name, 100)
        assert entry["metrics"]["covariance"] < 0.01
    for name in ("log-gamma, D = 5", "garch", "banana"):
        safe, linear = (
            few.pick(study, ("w_sgld_b", how), name, 100)["metrics"]["covariance"]
            for how in ("safeguarded", "calibrated")
        )
        assert safe < 0.2
        assert linear > 1


# --------------------------------------------------------------------------------- logistic regression


def made(method, seed, step, accuracy, seconds=1.0):
    metrics = {"step": step, "accuracy": accuracy, "log_likelihood": -0.5, "mean_error": 1.0}
    metrics |= {"sd_low": 0.5, "sd": 1.0, "sd_high": 2.0}
    return {"config": {"method": method}, "seed": seed, "metrics": metrics, "seconds": seconds}


def test_arrival_is_counted_from_the_posterior_of_the_same_split():
    found = [
        made(logistic_tables.REFERENCE, 0, 0, 0.75),
        made(logistic_tables.REFERENCE, 1, 0, 0.80),
    ]
    for step, accuracy in ((10, 0.70), (20, 0.746), (30, 0.74), (40, 0.747), (50, 0.76)):
        found.append(made("a", 0, step, accuracy, step / 10))
    for step, accuracy in ((10, 0.796), (20, 0.80)):
        found.append(made("a", 1, step, accuracy, step / 10))
    found += [made("b", 0, 10, 0.7), made("b", 0, 20, 0.7499999), made("b", 1, 10, 0.7)]
    assert logistic_tables.arrivals(found, "a") == [
        {"first": 20, "seconds": 2.0, "stays": 40},
        {"first": 10, "seconds": 1.0, "stays": 10},
    ]
    second, third = logistic_tables.arrivals(found, "b")
    assert second["first"] == second["stays"] == 20
    assert third["first"] == third["stays"] == np.inf
    rows = {row[0]: row for row in logistic_tables.speed(found)[1:]}
    assert rows["a"][2:4] == ["15 (10 to 20)", "25 (10 to 40)"]
    assert rows["b"][2] == "never (20 to never)"


def test_marks_are_ten_to_a_decade():
    marks = logistic.marks(10000)
    assert marks[0] == 10
    assert marks[-1] == 10000
    assert all(step % 10 == 0 for step in marks)
    assert {100, 130, 160, 200, 250, 320, 400, 500, 630, 790, 1000} <= set(marks)
    assert logistic.marks(45) == [10, 20, 30, 40]


def test_one_particle_stands_for_every_gamma():
    c = sensitivity.Config()
    wanted = [r.settings for r in sensitivity.runs(c)]
    assert {s["gamma"] for s in wanted if s["M"] == 1} == {0.0}
    assert {s["gamma"] for s in wanted if s["M"] == 2} == set(c.gammas)


def test_the_committed_records_of_figure_2_show_what_the_docs_say():
    """One plateau for all, the posterior's; ours there for good in half of SVGD's iterations, 75 % within 500."""
    found = records.read("logistic")
    names = logistic_tables.methods(found)
    assert len(names) == 9
    last = {
        name: [run[-1]["metrics"] for run in logistic_tables.curves(found, name)] for name in names
    }
    assert all(len(runs) == 5 for runs in last.values())
    means = [np.mean([m["accuracy"] for m in runs]) for runs in last.values()]
    assert max(means) - min(means) < 0.005
    svgd = np.median([a["first"] for a in logistic_tables.arrivals(found, "SVGD")])
    for name in ("px.calibrated", "w-SGLD-B, Ensemble"):
        assert max(a["stays"] for a in logistic_tables.arrivals(found, name)) <= svgd / 2
        for run in logistic_tables.curves(found, name):
            early = [r["metrics"]["accuracy"] for r in run if r["metrics"]["step"] <= 500]
            assert max(early) > 0.75
    exact = {r["config"]["method"]: r["metrics"] for r in records.read("plateau") if r["seed"] == 0}
    for metrics in exact.values():
        assert abs(metrics["accuracy"] - exact["px.sample"]["accuracy"]) < 0.0051
    assert 0.95 < exact["NumPyro NUTS"]["sd"] < 1.05


def test_growth_of_memory():
    """A line's slope per hour, without error; of two looks nobody knows."""
    times = np.arange(0, 7200, 60.0)
    np.testing.assert_allclose(soak.slope(times, 500 + times / 3600), (1, 0), atol=1e-9)
    np.testing.assert_allclose(soak.slope(times[:5], 500 + times[:5] / 3600), (1, 0), atol=1e-9)
    assert np.isnan(soak.slope(times[:2], times[:2])).all()
