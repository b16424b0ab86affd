"""Duplicates: exact ones by any spelling of white space, near ones by an estimate held against the true similarity."""

from __future__ import annotations

import itertools
import random
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rung.corpus.duplicates import Signature, TextKey, chance_found, nearly_same_text, same_text
from rung.corpus.words import words_of


def key(pieces: list[str]) -> bytes:
    made = TextKey()
    for piece in pieces:
        made.add(piece)
    return made.value().tobytes()


def signature(text: str, n: int = 5, permutations: int = 128) -> np.ndarray:
    made = Signature(permutations, n)
    made.add(words_of(text).hashes)
    return made.value()


@given(st.text("ab \n\t\u3000", max_size=20), st.text("ab \n\t\u3000", max_size=20), st.lists(st.integers(0, 20)))
def test_keys_are_equal_just_where_texts_are_but_for_white_space(one, two, cuts):
    bounds = sorted({0, len(one), *(cut for cut in cuts if cut <= len(one))})
    pieces = [one[a:b] for a, b in itertools.pairwise(bounds)]
    assert key(pieces) == key([one])
    assert (key([one]) == key([two])) == (" ".join(one.split()) == " ".join(two.split()))


def test_composed_and_decomposed_characters_are_one_text_and_case_is_not():
    text = "Les élèves ガラス"
    assert key([text]) == key([unicodedata.normalize("NFD", text)])
    assert key([text]) != key([text.lower()])


@given(st.lists(st.integers(0, 5), max_size=40))
def test_the_first_of_each_text_stays(numbers):
    keys = np.array([(n % 2, n) for n in numbers], np.uint64).reshape(-1, 2)
    expected = [numbers.index(n) if numbers.index(n) < k else -1 for k, n in enumerate(numbers)]
    assert same_text(keys).tolist() == expected


def test_similarity_is_estimated_within_three_deviations():
    rng = random.Random(1)
    base = [f"w{rng.randrange(10**6)}" for _ in range(3000)]
    for changed in (0, 30, 100, 300):
        other = list(base)
        for k in rng.sample(range(len(base)), changed):
            other[k] = f"x{rng.randrange(10**6)}"
        sets = [{tuple(words[k : k + 5]) for k in range(len(words) - 4)} for words in (base, other)]
        true = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        found = (signature(" ".join(base)) == signature(" ".join(other))).mean()
        assert abs(found - true) <= 3 * (true * (1 - true) / 128) ** 0.5 + 1e-9


def test_a_signature_does_not_depend_on_how_the_words_come():
    words = words_of(" ".join(f"w{k % 700}" for k in range(1000))).hashes
    whole, parts = Signature(64, 5), Signature(64, 5)
    whole.add(words)
    for start in range(0, 1000, 100):
        parts.add(words[max(start - 4, 0) : start + 100])
    assert np.array_equal(whole.value(), parts.value())


def test_near_duplicates_go_the_first_stays_and_what_is_less_like_stays_too():
    rng = random.Random(2)
    texts = []
    for _ in range(40):
        base = [f"w{rng.randrange(10**6)}" for _ in range(600)]
        texts += [base, [*base[:590], "new", "end"], [*base[:300], *(f"y{rng.randrange(10**6)}" for _ in range(300))]]
    signatures = np.array([signature(" ".join(words)) for words in texts])
    twins, similarity = nearly_same_text(signatures, 0.8)
    assert twins.tolist() == [k - 1 if k % 3 == 1 else -1 for k in range(len(texts))]
    assert (similarity[1::3] > 0.9).all()


def test_a_chain_of_likenesses_is_not_followed():
    rng = random.Random(3)
    words = [f"w{rng.randrange(10**6)}" for _ in range(1000)]
    chain = [words[k * 60 : k * 60 + 600] for k in range(5)]  # neighbours share 0.82, the next ones 0.66
    twins, _ = nearly_same_text(np.array([signature(" ".join(one), permutations=1024) for one in chain]), 0.75)
    assert twins.tolist() == [-1, 0, -1, 2, -1]


def test_texts_shorter_than_a_sequence_are_like_none():
    signatures = np.array([signature("a b"), signature("c d"), signature("")])
    assert nearly_same_text(signatures, 0.8)[0].tolist() == [-1, -1, -1]
    assert nearly_same_text(np.empty((0, 128), np.uint32), 0.8)[0].tolist() == []


def test_pairs_at_the_threshold_are_mostly_found_and_those_above_nearly_all():
    found = np.mean([pair_found(0.9, seed) for seed in range(60)])
    assert abs(found - chance_found(0.9, 128, 0.8)) < 0.1
    assert chance_found(0.8, 128, 0.8) > 0.8
    assert chance_found(0.9, 128, 0.8) > 0.99


def pair_found(similarity: float, seed: int) -> bool:
    rng = np.random.default_rng(seed)
    one = rng.integers(1, 2**32, 128, dtype=np.uint32)
    agree = rng.permutation(128) < round(similarity * 128)  # as MinHash makes them: independently of one another
    two = np.where(agree, one, rng.integers(1, 2**32, 128, dtype=np.uint32))
    return nearly_same_text(np.array([one, two]), 0.8)[0][1] == 0
