"""The language study: text as numbers, the LSTM and its gradient against slow NumPy, perplexities, the command line."""

import dataclasses
import functools
import itertools
import os
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import __main__ as command
from experiments import fetching, language, language_tables, records
from experiments import language_model as lm
from experiments import language_text as lt
from experiments import language_vectors as lv
from experiments.fetching import DatasetError
from particlax import predictive
from particlax.errors import NonFiniteError

COMPILE_FAST = True

TINY = lm.Shape(words=11, embedding=3, hidden=4, kind="float32")
SHARES = lm.log_shares(TINY, np.repeat(np.arange(11), np.arange(11)))
REAL = os.environ.get(fetching.VARIABLE)


@pytest.fixture
def folder(tmp_path):
    """A corpus in the format of Lau et al.: a document in a line, sentences apart by tabs."""
    text = {
        "train": "The cat sat .\tIt slept .\nthe cat ran .\n\n",
        "valid": "the cat flew .\n",
        "test": "the dog sat .\tthe cat .\n",
    }
    for part, words in text.items():
        (tmp_path / f"{part}.txt").write_text(words)
    return tmp_path


def words(corpus, part):
    return [corpus.vocabulary[number] for number in corpus.parts[part]]


# ------------------------------------------------------------------------------------------- tokeniser


@pytest.mark.parametrize(
    ("chunk", "wanted"),
    [
        ("Film,", "film ,"),
        ("don't", "do n't"),
        ("CAN\u2019T!", "ca n't !"),
        ("she'll", "she 'll"),
        ("Brien's", "brien 's"),
        ("o'brien", "o'brien"),
        ("actors'", "actors '"),
        ("'em", "'em"),
        ('"(well-made)"', '" ( well-made ) "'),
        ("cannot", "can not"),
        ("U.S.", "u.s."),
        ("Mr.", "mr."),
        ("J.", "j."),
        ("I.", "i ."),
        ("end.The", "end . the"),
        ("wait.....what?!?", "wait ... what ?!?"),
        ("1,000.50", "1,000.50"),
        ("10/10", "10/10"),
        ("$5", "$ 5"),
        ("80%", "80 %"),
        ("_Alien_", "_ alien _"),
        ("yes--no", "yes -- no"),
        (":-)", ":-)"),
        ("http://a.b/c?d", "http://a.b/c?d"),
        ("", ""),
    ],
)
def test_tokens(chunk, wanted):
    assert lt.tokens(chunk.translate(lt.PLAIN)) == wanted.split()


def test_sentences_end_with_marks_quotes_and_lines():
    """Quotes and brackets after an end mark belong to it, an ellipsis ends nothing, nor does a title."""
    index = lt.Index(lt.SPECIAL)
    texts = ['He said "No." "Why?"  Then ... (Mr. X left!) twice<br /><br />a line', " \n ", "two"]
    ids = lt.tokenised(texts, index)
    said = " ".join(np.array(list(index))[ids]).split(" <eos>")
    assert [one.strip() for one in said] == [
        'he said " no . " "', 'why ? "', "then ... ( mr. x left ! )", "twice", "a line", "two", "",
    ]  # fmt: skip


def test_tokens_agree_with_the_published_sample():
    """A piece of the toy data that comes with the code of Lau et al., joined again."""
    split = 'smallwood , who has n\'t seen his brother ( 23-year-old ) , says the u.s. paid " $ 1,000 " .'
    text = 'Smallwood, who hasn\'t seen his brother (23-year-old), says the U.S. paid "$1,000".'
    index = lt.Index(lt.SPECIAL)
    ids = lt.tokenised([text], index)
    assert [list(index)[number] for number in ids] == [*split.split(), "<eos>"]


# -------------------------------------------------------------------------------------- corpora and files


def test_folder_and_vocabulary(folder):
    """Words seen often enough in training, by frequency; the others and all of validation's and test's own are <unk>."""
    corpus = lt.folder(folder, minimum=2)
    assert corpus.vocabulary == [*lt.SPECIAL, ".", "the", "cat"]
    assert " ".join(words(corpus, "train")) == (
        "the cat <unk> . <eos> <unk> <unk> . <eos> the cat <unk> . <eos>"
    )
    assert " ".join(words(corpus, "test")) == "the <unk> <unk> . <eos> the cat . <eos>"
    assert corpus.documents == {"train": 2, "valid": 1, "test": 1}
    assert corpus.parts["train"].dtype == np.uint8
    assert lt.read(str(folder), minimum=1).vocabulary[4:7] == [".", "the", "cat"]
    assert language_tables.facts(corpus)["sentences"] == [3, 1, 2]


def test_a_corpus_comes_back_from_its_file(folder, tmp_path):
    corpus = lt.folder(folder, minimum=1)
    path = tmp_path / "deep" / "a.npz"
    lt.save(corpus, path)
    again = lt.read(str(path))
    assert again.name == corpus.name == folder.name
    assert again.vocabulary == corpus.vocabulary
    assert again.documents == corpus.documents
    for part in lt.PARTS:
        assert again.parts[part].dtype == corpus.parts[part].dtype
        assert np.array_equal(again.parts[part], corpus.parts[part])
    assert [p.name for p in path.parent.iterdir()] == ["a.npz"]


def test_known_corpora_are_kept(tmp_path, monkeypatch, folder):
    calls = []

    def made(minimum):
        calls.append(minimum)
        return lt.folder(folder, minimum)

    monkeypatch.setitem(lt.KNOWN, "imdb", made)
    first = lt.read("imdb", str(tmp_path / "home"), 2)
    monkeypatch.setenv(fetching.VARIABLE, str(tmp_path / "home"))
    second = lt.read("imdb", "", 2)
    assert second.vocabulary == first.vocabulary
    assert calls == [2]
    lt.read("imdb", "", 1)
    assert calls == [2, 1]


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch, folder, capsys):
    monkeypatch.setitem(lt.KNOWN, "imdb", lambda minimum: lt.folder(folder, minimum))
    (tmp_path / "file").write_text("")
    assert lt.read("imdb", str(tmp_path / "file"), 1).documents["train"] == 2
    assert "not kept" in capsys.readouterr().out


def test_missing_and_damaged_files_are_named(folder, tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere: no such folder; expected imdb"):
        lt.read(str(tmp_path / "nowhere"))
    with pytest.raises(DatasetError, match=r"nowhere.npz: no such file; make it anew"):
        lt.read(str(tmp_path / "nowhere.npz"))
    corpus = lt.folder(folder, minimum=1)
    path = tmp_path / "a.npz"
    lt.save(corpus, path)
    whole = path.read_bytes()
    for damage in (whole[:-100], b"", b"nothing", whole[:200] + b"\0" * 20 + whole[220:]):
        path.write_bytes(damage)
        with pytest.raises(DatasetError, match=r"a.npz cannot be read.*delete it"):
            lt.read(str(path))
    lt.save(corpus._replace(vocabulary=corpus.vocabulary[:-1]), path)
    with pytest.raises(DatasetError, match="is damaged"):
        lt.read(str(path))
    lt.save(corpus, path)
    with np.load(path) as found:
        np.savez(path, **{**{name: found[name] for name in found.files}, "format": 99})
    with pytest.raises(DatasetError, match="has format 99, expected"):
        lt.read(str(path))
    (folder / "valid.txt").unlink()
    with pytest.raises(DatasetError, match=r"valid.txt cannot be read"):
        lt.read(str(folder))
    (folder / "valid.txt").write_text("\n \n")
    with pytest.raises(DatasetError, match=r"valid.txt has no documents"):
        lt.read(str(folder))


def test_real_imdb():
    if not REAL or not any(os.path.exists(f"{REAL}/imdb/{n}") for n in ("aclImdb", "aclImdb_v1.tar.gz")):  # fmt: skip
        pytest.skip(f"{fetching.VARIABLE} does not name a folder with imdb/aclImdb or its archive")
    if not os.environ.get("PARTICLAX_SLOW"):
        pytest.skip("a minute of work; PARTICLAX_SLOW=1 runs it")
    about = language_tables.facts(lt.imdb())
    assert about["documents"] == [75_000, 12_500, 12_500]
    assert about["vocabulary"] == 35_935
    assert about["words"][0] == 21_093_288


def test_real_wikitext2():
    if not REAL or not os.path.exists(f"{REAL}/wikitext2"):
        pytest.skip(f"{fetching.VARIABLE} does not name a folder with wikitext2")
    about = language_tables.facts(lt.wikitext2())
    assert about["words"] == [2_088_628, 217_646, 245_569]
    assert about["vocabulary"] == 12_982


# ------------------------------------------------------------------------------------------------- rows


def cut(ids, length):
    """Input and output of each sequence, as the code of Lau et al. cuts sentences."""
    found, sentence = [], [lt.GO]
    for number in ids.tolist():
        sentence.append(number)
        if number == lt.EOS:
            for at in range(0, len(sentence), length):
                piece = sentence[at : at + length + 1]
                if len(piece) > 1:
                    found.append((tuple(piece[:-1]), tuple(piece[1:])))
            sentence = [lt.GO]
    return found


def unpacked(rows):
    """The sequences of packed rows."""
    found = []
    for x, y, begin in zip(*rows, strict=True):
        size = np.count_nonzero(y)
        assert not y[size:].any()
        assert not x[size:].any()
        places = [*np.flatnonzero(begin), size]
        for a, b in itertools.pairwise(places):
            found.append((tuple(x[a:b].tolist()), tuple(y[a:b].tolist())))
    return found


@pytest.mark.parametrize("width", [5, 7, 12])
def test_rows_hold_every_sequence_once(width):
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 50, 2000)
    ids[rng.random(2000) < 0.1] = lt.EOS
    ids[-1] = lt.EOS
    rows = lt.packed(ids.astype(np.uint16), 5, width)
    assert sorted(unpacked(rows)) == sorted(cut(ids, 5))
    assert rows.tokens == len(ids)
    assert rows.tokens / rows.x.size > 0.8
    assert rows.x.dtype == np.uint16


def test_rows_must_hold_a_sequence():
    with pytest.raises(ValueError, match="rows of 3 words"):
        lt.packed(np.array([lt.EOS]), 5, 3)


# --------------------------------------------------------------------------------- the network, slowly


def reference(params, x, y):
    """log p of the words y of one sequence, in float64, one word and one unit at a time."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    p |= {name: p[name][: TINY.words] for name in ("output", "output_bias")}
    hidden = len(p["recurrent"])
    h, c, found = np.zeros(hidden), np.zeros(hidden), []
    sigmoid = lambda v: 1 / (1 + np.exp(-v))
    for word, truth in zip(x, y, strict=True):
        z = p["bias"].copy()
        for k in range(4 * hidden):
            for e in range(p["input"].shape[0]):
                z[k] += p["embedding"][word, e] * p["input"][e, k]
            for j in range(hidden):
                z[k] += h[j] * p["recurrent"][j, k]
        i, f, g, o = z.reshape(4, hidden)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        logits = p["output_bias"] + p["output"] @ h + np.log(np.arange(1, 12) / 66)
        found.append(logits[truth] - np.log(np.sum(np.exp(logits))))
    return found


def network(seed=0, shape=TINY):
    params = lm.start(shape, jax.random.key(seed))
    return {name: leaf + 0.3 * jax.random.normal(jax.random.key(7 + seed), leaf.shape) for name, leaf in params.items()}  # fmt: skip


def text(num=60, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, TINY.words, num)
    ids[rng.random(num) < 0.2] = lt.EOS
    ids[-1] = lt.EOS
    return lt.packed(ids.astype(np.uint8), 6, 8)


def arrays(rows):
    return {name: jnp.asarray(a) for name, a in rows._asdict().items()}


def test_likelihood_of_padded_rows_against_numpy():
    rows, params = text(), network()
    assert (rows.y == lt.PAD).any()
    assert (rows.start.sum(1) > 1).any()
    found, carried = lm.likelihood(TINY, SHARES, 0.0)(params, arrays(rows), (), jax.random.key(0))
    wanted = [
        sum(sum(reference(params, x, y)) for x, y in unpacked([a[None] for a in row]))
        for row in zip(*rows, strict=True)
    ]
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert carried == ()


def slow_gradient(value, params, name, count=12):
    """Central differences of some entries, in float64."""
    rng = np.random.default_rng(1)
    p = {key: np.asarray(leaf, np.float64) for key, leaf in params.items()}
    places = rng.integers(0, p[name].size, count)
    if name.startswith("output"):  # of the rows, mostly those that are words
        places = places % ((TINY.words + 2) * (p[name].size // 128))
    found = []
    for place in places:
        ends = []
        for sign in (1, -1):
            moved = p[name].copy()
            moved.flat[place] += sign * 1e-5
            ends.append(value(p | {name: moved}))
        found.append((ends[0] - ends[1]) / 2e-5)
    return places, np.array(found)


@pytest.mark.parametrize(
    "name", ["embedding", "input", "recurrent", "bias", "output", "output_bias"]
)
def test_gradients_by_hand_against_differences(name):
    rows, params = text(25), network(1)
    sequences = unpacked(rows)
    slow = lambda p: sum(sum(reference(p, x, y)) for x, y in sequences)
    fast = lambda p: jnp.sum(
        lm.likelihood(TINY, SHARES, 0.0)(p, arrays(rows), (), jax.random.key(0))[0]
    )
    gradient = np.asarray(jax.grad(fast)(params)[name])
    places, wanted = slow_gradient(slow, params, name)
    np.testing.assert_allclose(gradient.flat[places], wanted, rtol=1e-3, atol=2e-5)


def plain_recur(inputs, recurrent, begin):
    """The recursion without a gradient of its own."""

    def step(carry, now):
        into, fresh = now
        h, c = (jnp.where(fresh[:, None], 0, a) for a in carry)
        i, f, g, o = jnp.split(into + h @ recurrent, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((inputs.shape[1], len(recurrent)))
    return jax.lax.scan(step, (zero, zero), (inputs, begin))[1]


def test_recursion_against_automatic_differentiation(key):
    keys = jax.random.split(key, 4)
    inputs = jax.random.normal(keys[0], (3, 9, 5, 16))
    recurrent = jax.random.normal(keys[1], (3, 4, 16))
    begin = jax.random.bernoulli(keys[2], 0.3, (9, 5))
    weight = jax.random.normal(keys[3], (9, 5, 4))
    results = []
    for function in (functools.partial(lm.recur, 4), plain_recur):
        value = lambda a, b, f=function: jnp.sum(jnp.sin(f(a, b, begin)) * weight)
        results.append(jax.vmap(jax.value_and_grad(value, (0, 1)))(inputs, recurrent))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *results)


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_change_nothing(chunk):
    rows, params = text(), network()
    value = lambda shape: jax.value_and_grad(
        lambda p: jnp.sum(
            jnp.arange(1.0, 1 + len(rows.x))
            * lm.likelihood(shape, SHARES, 0.4)(p, arrays(rows), (), jax.random.key(3))[0]
        )
    )(params)
    whole, parts = value(TINY), value(TINY._replace(chunk=chunk))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), whole, parts)


def test_scores_of_words_against_log_softmax(key):
    keys = jax.random.split(key, 4)
    states, table = jax.random.normal(keys[0], (6, 4)), jax.random.normal(keys[1], (11, 4))
    bias, y = jax.random.normal(keys[2], (11,)), jax.random.randint(keys[3], (6,), 0, 11)
    weight = jnp.arange(6.0)

    def plain(states, table, bias):
        return jnp.sum(weight * jax.nn.log_softmax(states @ table.T + bias)[jnp.arange(6), y])

    by_hand = lambda *a: jnp.sum(weight * lm.word_scores("float32", *a, y))
    found, wanted = (jax.value_and_grad(f, (0, 1, 2))(states, table, bias) for f in (by_hand, plain))  # fmt: skip
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def sampled_by_hand(logits, y, head, sample):
    """log of the share of y, in float64, one word at a time: y itself, the head, and what is drawn that is not y."""
    found = []
    for row, truth in zip(np.asarray(logits, np.float64), np.asarray(y), strict=True):
        total = np.exp(row[truth]) + sum(np.exp(row[word]) for word in range(head) if word != truth)
        for word, weight in zip(sample.words, np.asarray(sample.log_weight), strict=True):
            total += np.exp(row[word] + weight) if word != truth else 0
        found.append(row[truth] - np.log(total))
    return np.array(found)


@pytest.mark.parametrize("everything", [True, False])
def test_scores_with_a_sampled_denominator_against_the_formula(key, everything):
    """With every word beyond the head once, it is the plain softmax."""
    keys = jax.random.split(key, 4)
    layer = (
        jax.random.normal(keys[0], (6, 4)),
        jax.random.normal(keys[1], (11, 4)),
        jax.random.normal(keys[2], (11,)),
    )
    y = jnp.array([0, 2, 10, 4, 2, 9])  # in the head, drawn or not, drawn twice
    some = lm.Sample(jnp.array([3, 9, 4, 9]), jnp.array([0.5, -0.2, 0.1, 0.7]))
    sample = lm.Sample(jnp.arange(3, 11), jnp.zeros(8)) if everything else some
    weight, shape = np.arange(1.0, 7.0), TINY._replace(head=3)

    def value(states, table, bias):
        return jnp.sum(weight * lm.sampled_scores(shape, states, (table, bias), y, sample))

    def by_hand(states, table, bias):
        return np.sum(weight * sampled_by_hand(states @ table.T + bias, y, 3, sample))

    layer64 = tuple(np.asarray(part, np.float64) for part in layer)
    found, slopes = jax.value_and_grad(value, (0, 1, 2))(*layer)
    assert float(found) == pytest.approx(by_hand(*layer64), rel=1e-5)
    for place, part in enumerate(layer64):
        for at in np.ndindex(part.shape):
            ends = []
            for move in (-1e-4, 1e-4):
                moved = [a.copy() for a in layer64]
                moved[place][at] += move
                ends.append(by_hand(*moved))
            assert float(slopes[place][at]) == pytest.approx((ends[1] - ends[0]) / 2e-4, rel=1e-3, abs=1e-4)  # fmt: skip
    if everything:
        whole = lambda *a: jnp.sum(weight * lm.word_scores("float32", *a, y))
        wanted, wanted_slopes = jax.value_and_grad(whole, (0, 1, 2))(*layer)
        assert float(found) == pytest.approx(float(wanted), rel=1e-5)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), slopes, wanted_slopes)  # fmt: skip


def test_no_sampled_score_is_above_one(key):
    """A rare word that the network is sure of, and that was not drawn, is in the denominator all the same."""
    states, table = jnp.ones((1, 4)), jnp.zeros((11, 4)).at[10].set(5.0)
    sample = lm.Sample(jnp.array([4, 5]), jnp.array([1.0, 1.0]))
    score = lm.sampled_scores(TINY._replace(head=3), states, (table, jnp.zeros(11)), jnp.array([10]), sample)  # fmt: skip
    assert -1e-6 < score[0] <= 0


def test_no_sampled_score_of_the_head_is_above_one_in_16_bits(key):
    keys, shape = jax.random.split(key), TINY._replace(words=80, head=50, kind="bfloat16")
    states, table = 3 * jax.random.normal(keys[0], (32, 16)), jax.random.normal(keys[1], (80, 16))
    y = jnp.argmax((states @ table.T)[:, :50], 1)
    sample = lm.Sample(jnp.array([60, 70]), jnp.zeros(2))
    given = states.astype(jnp.bfloat16), (table, jnp.zeros(80)), y, sample
    assert lm.sampled_scores(shape, *given).max() < 1e-5
    assert lm.sampled_scores(shape, *given).max() > -0.1  # some are all but sure


def test_the_mean_of_a_sampled_sum_is_the_whole_sum(key):
    """Over many draws, for a function that is large where words are rare; and no word of the head, nor beyond the vocabulary."""
    rng, shape = np.random.default_rng(0), lm.Shape(words=40, head=6, samples=8)
    shares = lm.log_shares(shape, np.repeat(np.arange(40), rng.integers(1, 1000, 40)))
    value = rng.uniform(0.5, 2, 40)
    draws = jax.vmap(lambda key: lm.drawn(shape, shares, key))(jax.random.split(key, 4000))
    assert draws.words.min() == 6 and draws.words.max() == 39
    sums = np.sum(np.exp(draws.log_weight) * value[draws.words], 1)
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - value[6:].sum()) < 4 * error
    assert error < 0.02 * value[6:].sum()


def test_a_sampled_likelihood_learns_what_the_whole_one_does():
    """Its gradient is near the whole one on average over keys."""
    rows, params = text(), network()
    shape = TINY._replace(head=4, samples=64)
    value = lambda shape, key: jax.grad(
        lambda p: jnp.sum(lm.likelihood(shape, SHARES, 0.0)(p, arrays(rows), (), key)[0])
    )(params)
    whole = value(TINY, jax.random.key(0))
    many = jax.vmap(functools.partial(value, shape))(jax.random.split(jax.random.key(1), 400))
    for name, slope in whole.items():
        error = jnp.linalg.norm(many[name].mean(0) - slope)
        assert error < 0.02 * jnp.linalg.norm(slope), name


def test_bfloat16_is_near_float32():
    rows, params = text(), network()
    value = lambda kind: jax.value_and_grad(
        lambda p: jnp.sum(
            lm.likelihood(TINY._replace(kind=kind), SHARES, 0.0)(
                p, arrays(rows), (), jax.random.key(0)
            )[0]
        )
    )(params)
    (exact, slopes), (rough, others) = value("float32"), value("bfloat16")
    assert abs(exact - rough) < 0.01 * abs(exact)
    for name, slope in slopes.items():
        assert others[name].dtype == jnp.float32
        assert jnp.linalg.norm(others[name] - slope) < 0.03 * jnp.linalg.norm(slope)


def test_dropout_keeps_the_mean():
    a = jnp.ones((200, 200))
    seen = lm.dropped(jax.random.key(0), 0.4, a)
    np.testing.assert_allclose(np.unique(seen), [0, 1 / 0.6], rtol=1e-6)
    assert abs(float(seen.mean()) - 1) < 0.02
    assert lm.dropped(None, 0.4, a) is a


# ------------------------------------------------------------------------------------------ vectors


def test_counts_and_information_against_loops():
    rng, words = np.random.default_rng(0), 6
    ids = rng.integers(0, words, 40).astype(np.uint16)
    wanted = np.zeros((words, words))
    for i, a in enumerate(ids):
        for j, b in enumerate(ids):
            if 0 < abs(i - j) <= 5:
                wanted[a, b] += 1 / abs(i - j)
    wanted[wanted < lv.LEAST] = 0
    found = lv.counts(ids, words)
    np.testing.assert_allclose(found.toarray(), wanted, rtol=1e-5)
    often = wanted.sum(1)
    chance = often**0.75 / (often**0.75).sum()
    with np.errstate(divide="ignore"):
        excess = np.log(wanted / often[:, None] / chance)
    np.testing.assert_allclose(
        lv.positive_information(found).toarray(), np.maximum(excess, 0), rtol=1e-4, atol=1e-6
    )


def test_vectors_are_the_leading_singular_ones():
    ids = np.random.default_rng(1).integers(0, 60, 3000)
    left, values, _ = np.linalg.svd(lv.positive_information(lv.counts(ids, 60)).toarray())
    found = lv.vectors(ids, 60, 5)
    wanted = left[:, :5] * np.sqrt(values[:5])
    wanted /= np.sqrt(np.mean(wanted**2))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, rtol=1e-2, atol=1e-2)
    wide = lv.vectors(ids, 60, 100)  # more dimensions than words
    assert wide.shape == (60, 100) and not wide[:, 60:].any()
    assert np.mean(wide**2) == pytest.approx(1, rel=1e-4)


def test_embeddings_start_from_vectors_or_noise():
    c = language.Config(corpus="synthetic", minimum=1, embedding=8, hidden=8, particles=3)
    ours = language.begun(c, jax.random.key(0))["embedding"]
    noise = language.begun(dataclasses.replace(c, vectors=False), jax.random.key(0))["embedding"]
    assert ours.dtype == noise.dtype == jnp.float32 and ours.shape == noise.shape
    assert jnp.array_equal(ours[0], ours[2]) and not jnp.array_equal(noise[0], noise[2])
    assert jnp.std(ours) == pytest.approx(float(jnp.std(noise)), rel=0.1)


# ------------------------------------------------------------------------------------------ perplexity


def test_perplexity_of_the_mixture_against_numpy():
    rows = text(80)
    networks = [network(seed) for seed in range(3)]
    particles = jax.tree.map(lambda *leaves: jnp.stack(leaves), *networks)
    each = np.array([
        [v for x, y in unpacked(rows) for v in reference(params, x, y)] for params in networks
    ])  # fmt: skip
    wanted = np.exp(-each.mean(1)), np.exp(-np.mean(np.log(np.mean(np.exp(each), 0))))
    for batch in (1, 4, 100):
        found = lm.perplexities(TINY, SHARES, particles, rows, batch)
        np.testing.assert_allclose(found[:-1], wanted[0], rtol=1e-5)
        np.testing.assert_allclose(found[-1], wanted[1], rtol=1e-5)
    library = predictive.log_density(
        _logits, particles, arrays(rows), rows.y.astype(int), batch_size=5
    )
    np.testing.assert_allclose(np.exp(-library[rows.y != lt.PAD].mean()), wanted[1], rtol=1e-5)


def _logits(params, rows):
    out = lm.states(TINY, params, rows["x"].T.astype(int), rows["start"].T)
    logits = out @ params["output"].T + params["output_bias"] + SHARES
    return jnp.swapaxes(logits[..., : TINY.words], 0, 1)


# ------------------------------------------------------------------------------------------- the study


def tiny(**changes):
    return language.Config(**(language.STUDY.smoke | changes))


@pytest.mark.parametrize("method", ["SGLD", "SGLD, cold"])
def test_sgld_learns(method):
    """From 44 words to choose from, towards the three that may follow."""
    c = tiny(epochs=12.0, batch=8, sgld=0.01, rmsprop=0.01, evaluations=1, hidden=16)
    *_, last = language.work(c, method, 0)
    assert last.metrics["test"] < 20
    assert last.metrics["test"] <= last.metrics["single_test"] + 1e-6
    assert last.extra["corpus"]["vocabulary"] == 44


def test_the_study_from_the_command_line(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    path = tmp_path / "it.npz"
    language.main(["prepare", str(folder), str(path), "--minimum=1"])
    assert "'documents': [2, 1, 1]" in capsys.readouterr().out
    command.main(
        ["run", "language", "--smoke", f"--corpus={path}", "--methods=SGD;RMSprop", "--batch=2"]
    )
    found = records.read("language", "smoke")
    assert [r["config"]["method"] for r in found if "corpus" in r] == ["SGD", "RMSprop"]
    assert {r["config"]["corpus"] for r in found} == {folder.name}
    printed = capsys.readouterr().out
    assert "RMSprop" in printed
    with pytest.raises(SystemExit, match="no method 'SGDD'; the methods are: SGD; RMSprop"):
        command.main(["run", "language", "--smoke", "--methods=SGDD"])
    with pytest.raises(DatasetError, match="no such folder"):
        command.main(["run", "language", "--corpus=nowhere"])
    with pytest.raises(SystemExit, match=re.escape("python -m experiments.language prepare imdb")):
        language.main([])


def test_time_is_printed(capsys):
    arguments = [f"--{key}={value}" for key, value in language.STUDY.smoke.items()]
    language.main(["time", *[a for a in arguments if "methods" not in a], "--methods=Adam"])
    assert re.search(r"Adam: \d+\.\d ms a step, \d+\.\d thousand words/s", capsys.readouterr().out)


def stepped(run, until):
    """In place of `Training.go`: every bias is one higher."""
    where = lambda state: (state.step, state.particles["bias"])
    new = (jnp.int32(until), run.state.particles["bias"] + 1)
    run.state = eqx.tree_at(where, run.state, new)
    return until / run.batches.batches_per_epoch


def test_it_stops_when_validation_gets_worse(monkeypatch):
    """After two evaluations that are worse than the best; what is reported is the best."""
    values = iter([9.0, 5.0, 6.0, 5.5, 4.0])
    seen = []

    def evaluate(c, particles, sample=0):
        seen.append(float(particles["bias"].mean()))
        return {"valid": next(values) if sample else 0.0, "test": 1.0}

    monkeypatch.setattr(language, "evaluate", evaluate)
    monkeypatch.setattr(language.Training, "go", stepped)
    found = list(language.work(tiny(evaluations=5), "Adam", 0))
    assert [one.metrics["valid"] for one in found] == [9.0, 5.0, 6.0, 5.5, 0.0]
    np.testing.assert_allclose(np.diff(seen), [1, 1, 1, -2])
    assert found[-1].metrics["epoch"] == found[1].metrics["epoch"]


def test_a_run_that_fails_reports_the_best_it_had(monkeypatch):
    calls = []

    def fails(self, until):
        calls.append(until)
        if len(calls) == 2:
            raise NonFiniteError("at step 9", step=9, particles=[0], state=None)
        return stepped(self, until)

    monkeypatch.setattr(language.Training, "go", fails)
    found = list(language.work(tiny(), "Adam", 0))
    assert len(found) == 2
    assert found[-1].extra["failed"] == "at step 9"
    assert found[-1].metrics["epoch"] == found[0].metrics["epoch"] > 0


def test_pace():
    rate = language.pace(tiny(warmup=0.1, decay=0.5), 2.0, 100)
    seen = [float(rate(step)) for step in (0, 9, 30, 50, 75, 99, 100)]
    np.testing.assert_allclose(seen, [0.2, 2, 2, 2, 1, 0.04, 0], atol=1e-6)


def test_clipping_is_by_particle():
    clip = language.clipped(1.0)
    gradient = {"a": jnp.array([[3.0, 0.0], [0.3, 0.0]]), "b": jnp.array([4.0, 0.4])}
    found, _ = clip.update(gradient, clip.init(gradient))
    np.testing.assert_allclose(found["a"], [[0.6, 0], [0.3, 0]], rtol=1e-6)
    np.testing.assert_allclose(found["b"], [0.8, 0.4], rtol=1e-6)


def test_tables_of_records():
    metrics = {"epoch": 2.0, "ms": 20.0} | {
        f"{single}{part}{sd}": value
        for part in ("valid", "test")
        for single, sd, value in (("", "", 70.0), ("single_", "", 75.0), ("single_", "_sd", 0.5))
    }
    entry = {
        "config": {"corpus": "imdb", "method": "SGD", "epochs": 2.0}, "metrics": metrics, "seconds": 100.0, "evaluation": [2, 2],
        "corpus": language_tables.facts(lt.synthetic()),
    }  # fmt: skip
    half = entry | {"evaluation": [1, 2]}
    rows = language_tables.table([half, entry], "imdb")
    assert rows[1][:8] == [
        "SGD", "2", "noise", "whole", "1", "72.14", "70.00 (ensemble)", "75.00 ±0.50"
    ]  # fmt: skip
    assert len(rows) == 2
    longer = entry | {"config": entry["config"] | {"epochs": 8.0, "vectors": True}}
    some = longer | {"config": longer["config"] | {"head": 10, "samples": 20}}
    every = longer | {"config": longer["config"] | {"head": 20, "samples": 24}}  # of 44 words
    both = language_tables.table([longer, entry, some, every, entry], "imdb")
    assert [row[:5] for row in both[1:]] == [
        ["SGD", "2", "noise", "whole", "2"], ["SGD", "8 (best 2.0)", "the text", "whole", "2"],
        ["SGD", "8 (best 2.0)", "the text", "sampled", "1"],
    ]  # fmt: skip
    cold = entry | {"config": entry["config"] | {"method": "SGLD, cold", "cold": 1e-3, "rmsprop": 1e-3, "floor": 1e-5}}  # fmt: skip
    colder = cold | {"config": cold["config"] | {"cold": 1e-5, "rmsprop": 3e-3}}
    assert language_tables.table([cold, cold], "imdb")[1][0] == "SGLD, cold"
    rows = language_tables.table([cold, colder, colder], "imdb")[1:]
    assert [(row[0], row[4], row[5]) for row in rows] == [
        ("SGLD, cold, temperature 0.001, rate 0.001", "1", "68.12"), ("SGLD, cold, temperature 1e-05, rate 0.003", "2", "68.12"),
    ]  # fmt: skip
    assert len(language_tables.table([entry], "bnc")) == 1
    other = entry | {"config": {"corpus": "mine", "method": "SVGD", "epochs": 2.0}}
    row = language_tables.table([entry, other], "")[1]
    assert (row[0], row[5], row[6]) == ("mine: SVGD", "-", "70.00")
    alone = entry | {"config": other["config"] | {"method": "SGD"}}
    assert language_tables.table([alone], "")[1][6] == "70.00 (ensemble)"
    assert language_tables.corpora([entry])[1][:4] == ["imdb", "44", "train", "300"]
