"""The experiments run at a tiny size, and what is written from records is up to date."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import config, few, records, reference, tables, toy


def test_the_toy_study_writes_its_report(tmp_path, capsys):
    settings = toy.Config(
        particles=30, few=10, steps=3, chain_thin=2, variants=True, out=str(tmp_path)
    )
    page = toy.main(settings)
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.replace("http-equiv", "")  # self-contained
    found = json.loads((tmp_path / "table.json").read_text())
    assert {r["config"]["sampler"] for r in found} >= {*toy.FIGURE_ROWS, "pi-SGLD, noise"}
    assert len(found) == 2 * 4 * 9
    for entry in found:
        assert entry["metrics"]["W2"] > 0
        assert len(entry["metrics"]["shares"]) == len(
            toy.DENSITIES[entry["config"]["density"]].regions
        )
        assert entry["seconds"] >= 0
    assert f"report: {page}" in capsys.readouterr().out.replace("\n", "")


def test_records_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    entry = records.record("some", {"a": 1}, 3, {"W2": 0.12345678, "shares": [1.0, 2.0]}, 1.23456)
    records.write(tmp_path / "some" / "x.jsonl", [entry, entry])
    assert records.read("some") == [entry, entry]
    assert entry["metrics"] == {"W2": 0.123457, "shares": [1.0, 2.0]}
    assert {"revision", "device", "versions", "seed", "seconds"} <= set(entry)


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


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--step=3", "did you mean --steps"),
        ("--steps=many", "expected int"),
        ("steps=3", "unknown setting"),
        ("--record=maybe", "expected true or false"),
        ("--help", "--particles=2000"),
    ],
)
def test_bad_settings_end_with_a_message(argument, words):
    with pytest.raises(SystemExit) as caught:
        config.parse(toy.Config, [argument])
    assert words in str(caught.value)


def test_settings_are_typed():
    settings = config.parse(toy.Config, ["--steps=7", "--record", "--gamma=0.5"])
    assert (settings.steps, settings.record, settings.gamma) == (7, True, 0.5)


def test_the_few_particle_study_at_a_tiny_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    settings = few.Config(steps=3, targets="Gaussian, D = 2;Student t, D = 10", particles="8,15")
    few.main(dataclasses.replace(settings, record="tiny"))
    found = records.read("few")
    assert len(found) == 2 * 2 * 15
    refused = [r for r in found if r.get("failed") == "needs more particles"]
    assert {(r["config"]["target"], r["config"]["M"]) for r in refused} == {
        ("Student t, D = 10", 8)
    }
    for rows in (few.summary(found), few.table(found, 15), few.grid(found, 8)):
        assert len({len(row) for row in rows}) == 1
    assert "median covariance error" in capsys.readouterr().out


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


def test_an_unknown_target_is_named():
    with pytest.raises(SystemExit, match="the targets are"):
        few.main(few.Config(targets="Gauss"))


def test_the_reference_study_needs_its_folder(monkeypatch):
    monkeypatch.delenv("PARTICLAX_POSTERIORDB", raising=False)
    with pytest.raises(SystemExit, match="PARTICLAX_POSTERIORDB"):
        reference.main(reference.Config())


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
