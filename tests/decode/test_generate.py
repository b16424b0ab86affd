from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny_models import SHAPES, next_logits, tiny, uncached_greedy

from rung.config import GenerateConfig
from rung.decode import generate as generate_module
from rung.decode.generate import Generator
from rung.errors import RungError

V, CONTEXT = 40, 32
PROMPT = [3, 17, 5, 9, 9, 21, 30]
LONG = [n * 7 % 40 for n in range(75)]
GREEDY = GenerateConfig(max_tokens=20, temperature=0.0, ignore_end=True)


def settings(**changes):
    return GenerateConfig(**{"max_tokens": 20, "temperature": 1.0, "ignore_end": True, **changes})


def generate(generator, prompt, settings, note=None):
    """Return the ids of each sample."""
    chunks = list(generator.generate_ids(prompt, settings, note))
    return [[int(i) for chunk in chunks for i in chunk.ids[sample]] for sample in range(settings.samples)]


def generator(shape="gpt2", vocab_size=V, end_id=0, n_layers=1, **sizes):
    model, weights = tiny(shape, vocab_size=max(vocab_size, V), n_layers=n_layers, **sizes)
    return Generator(model, weights, vocab_size=vocab_size, end_id=end_id)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt", [PROMPT, list(range(1, 33)), LONG], ids=["short", "full", "long"])
def test_cached_greedy_is_uncached_greedy_through_several_windows(shape, prompt):
    g = generator(shape, n_layers=2)
    count = 100  # windows move every 16 tokens
    expected = uncached_greedy(g.model, g.weights, prompt, count, V)
    assert len(set(expected)) > 3, "a loop over few tokens would show little"
    assert generate(g, prompt, settings(temperature=0.0, max_tokens=count)) == [expected]


@pytest.mark.parametrize("context_length", [1, 5])
def test_the_smallest_contexts(context_length):
    g = generator(context_length=context_length)
    expected = uncached_greedy(g.model, g.weights, PROMPT, 15, V)
    assert generate(g, PROMPT, settings(temperature=0.0, max_tokens=15)) == [expected]


def test_samples_slide_on_their_own_tokens():
    g = generator()
    samples = generate(g, PROMPT, settings(samples=2, top_k=2, max_tokens=60))
    assert len({tuple(sample) for sample in samples}) == 2
    for sample in samples:
        for n, token in enumerate(sample):
            logits = next_logits(g.model, g.weights, PROMPT + sample[:n])
            assert token in np.argsort(-logits)[:2], n


def test_a_prompt_is_what_was_generated_before_it():
    g = generator()
    whole = generate(g, PROMPT, settings(max_tokens=50, seed=5))[0]
    for cut in (1, 8, 33):
        assert generate(g, PROMPT + whole[:cut], settings(max_tokens=50 - cut, seed=5)) == [whole[cut:]]


def test_temperature_0_takes_the_most_probable_and_top_k_1_too():
    g = generator()
    greedy = generate(g, PROMPT, GREEDY)
    assert (
        greedy
        == generate(g, PROMPT, settings(top_k=1, seed=9))
        == generate(g, PROMPT, settings(temperature=0.0, top_p=0.1))
    )
    assert (
        generate(g, PROMPT, settings(top_k=V))
        == generate(g, PROMPT, settings(top_p=1.0))
        == generate(g, PROMPT, settings())
    )


def test_seeds():
    g = generator()
    assert generate(g, PROMPT, settings(seed=1)) == generate(g, PROMPT, settings(seed=1))
    assert generate(g, PROMPT, settings(seed=1)) != generate(g, PROMPT, settings(seed=2))


def test_a_sample_does_not_depend_on_how_many_are_drawn():
    g = generator()
    four = generate(g, PROMPT, settings(samples=4, max_tokens=50))
    assert generate(g, PROMPT, settings(samples=1, max_tokens=50)) == four[:1]
    assert generate(g, PROMPT, settings(samples=2, max_tokens=50)) == four[:2]
    assert len({tuple(sample) for sample in four}) == 4


@pytest.mark.parametrize("chunk_seconds", [0.0, 1e9], ids=["one token a chunk", "chunks as long as they may be"])
def test_chunks_change_nothing(monkeypatch, chunk_seconds):
    g = generator()
    expected = generate(g, PROMPT, settings(max_tokens=150, samples=2))
    monkeypatch.setattr(generate_module, "_CHUNK_SECONDS", chunk_seconds)
    assert generate(g, PROMPT, settings(max_tokens=150, samples=2)) == expected
    longest = max(len(chunk.ids[0]) for chunk in g.generate_ids(PROMPT, settings(max_tokens=150)))
    assert longest == (
        15 if chunk_seconds else 1
    )  # 15: from one move of the window to the next, which makes a token itself


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_few_tokens(max_tokens):
    g = generator()
    expected = uncached_greedy(g.model, g.weights, PROMPT, max_tokens, V)
    assert generate(g, PROMPT, settings(temperature=0.0, max_tokens=max_tokens)) == [expected]


def test_an_empty_prompt_begins_with_the_end_of_text():
    g = generator(end_id=4)
    assert generate(g, [], GREEDY) == generate(g, [4], GREEDY) == [uncached_greedy(g.model, g.weights, [4], 20, V)]


def test_the_text_ends_with_its_end():
    g = generator()
    free = generate(g, PROMPT, GREEDY)[0]
    at = next(n for n, token in enumerate(free) if n > 3 and token not in free[:n])
    g.end_id = free[at]
    chunks = list(g.generate_ids(PROMPT, settings(temperature=0.0, ignore_end=False)))
    assert [int(i) for chunk in chunks for i in chunk.ids[0]] == free[:at]
    assert [chunk.ended for chunk in chunks] == [(False,)] * (len(chunks) - 1) + [(True,)]
    assert generate(g, PROMPT, GREEDY) == [free]


def test_each_sample_ends_on_its_own():
    g = generator()
    long = generate(g, PROMPT, settings(samples=4, max_tokens=50))
    end = next(token for token in range(V) if sum(token in sample for sample in long) == 2)
    g.end_id = end
    chunks = list(g.generate_ids(PROMPT, settings(samples=4, max_tokens=50, ignore_end=False)))
    expected = [sample[: sample.index(end)] if end in sample else sample for sample in long]
    assert [[int(i) for chunk in chunks for i in chunk.ids[sample]] for sample in range(4)] == expected
    assert chunks[-1].ended == tuple(end in sample for sample in long)


def test_padding_of_the_vocabulary_is_never_produced():
    g = generator("nanolm", vocab_size=30)
    g.weights = {
        **g.weights,
        "head": {**g.weights["head"], "bias": np.where(np.arange(V) < 30, 0.0, 30.0).astype(np.float32)},
    }
    assert np.argmax(next_logits(g.model, g.weights, PROMPT[:-1])) >= 30, "unmasked, padding would win"
    for changes in ({"temperature": 0.0}, {"temperature": 1e6}, {"top_k": V, "repetition_penalty": 100.0}):
        assert max(max(ids) for ids in generate(g, PROMPT[:-1], settings(max_tokens=40, **changes))) < 30


def test_repetition_penalty_counts_prompt_and_generated():
    g, ids = generator(), list(PROMPT)
    for _ in range(40):  # past the context: also what slid out counts
        logits = next_logits(g.model, g.weights, ids).copy()
        seen = sorted(set(ids))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        ids.append(int(np.argmax(logits)))
    assert generate(g, PROMPT, settings(temperature=0.0, repetition_penalty=1.3, max_tokens=40)) == [ids[len(PROMPT) :]]
    assert generate(g, PROMPT, settings(temperature=0.0, max_tokens=40)) != [ids[len(PROMPT) :]]


def test_a_window_that_slides_is_said_once():
    g, notes = generator(), []
    generate(g, PROMPT, settings(max_tokens=25), notes.append)
    assert notes == []  # 7 + 25 is the context: the last token is predicted from 31
    generate(g, PROMPT, settings(max_tokens=26), notes.append)
    assert notes == []  # predicted from 32, which the model still sees
    generate(g, PROMPT, settings(max_tokens=90), notes.append)
    assert notes == ["the text is longer than the context of 32 tokens: the model sees the last 17 to 32"]
    notes.clear()
    generate(g, PROMPT * 7, settings(max_tokens=1), notes.append)
    assert notes == ["the prompt has 49 tokens, over the context of 32: the model sees the last 17"]


@pytest.mark.parametrize("bad", [-1, 30, 10**6])
def test_ids_that_are_no_token_are_refused(bad):
    with pytest.raises(RungError, match=str(bad)):
        generator(vocab_size=30).generate_ids([1, bad], GREEDY)


def test_a_tokenizer_larger_than_the_model_is_refused():
    g = generator()
    with pytest.raises(RungError, match="41"):
        Generator(g.model, g.weights, vocab_size=41, end_id=0)


def test_bad_settings_are_refused_before_any_work():
    with pytest.raises(RungError, match="temperature"):
        generator().generate_ids(PROMPT, settings(temperature=-1.0))


def test_few_programs_are_compiled():
    programs = (generate_module._prefill, generate_module._first, generate_module._more)
    before = [program._cache_size() for program in programs]
    g = generator(vocab_size=41, context_length=64)  # of a shape that no other test has
    for length in (1, 3, 9, 15, 16, 17, 20, 31, 40, 64, 90):
        for changes in (
            {},
            {"temperature": 0.3, "seed": 4, "ignore_end": False},
            {"temperature": 2.0, "max_tokens": 70},
        ):
            again = Generator(g.model, g.weights, vocab_size=41 - length % 2, end_id=length % 3)
            generate(again, [1] * length, settings(**changes))
    # The prompt's length in buckets of 16, 32 and 64; one draw; one loop.
    assert [program._cache_size() - n for program, n in zip(programs, before, strict=True)] == [3, 1, 1]


def test_the_loop_changes_the_cache_in_place():
    g = generator()
    state = generate_module._begin(g.model, 7, np.array(PROMPT), settings(), generate_module.Filters.of(settings()))
    _, cache = g._prefill(np.array([PROMPT], np.int32), 1)
    filters = generate_module.Filters.of(settings())
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    _, after, _, count = generate_module._more(
        g.model, g.weights, filters, np.int32(V), np.int32(-1), state, cache, 0, 5
    )
    assert int(count) == 5
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
