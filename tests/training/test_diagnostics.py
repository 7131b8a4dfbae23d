import math

import numpy as np
import pytest

from rollmill.training.diagnostics import TokenMeasures, token_figures, warnings


def measures(log_weights: list[float], current: list[bool], **changes: list[float]) -> TokenMeasures:
    size = len(log_weights)
    arrays = {"kept": [True] * size, "entropies": [1.0] * size, "staleness": [0] * size, **changes}
    return TokenMeasures(
        log_weights=np.array(log_weights),
        current=np.array(current),
        **{name: np.array(values) for name, values in arrays.items()},
    )


def test_figures_worked_out_by_hand():
    first = measures([math.log(2.0), 0.0], [True, True], kept=[True, False], staleness=[0, 0], entropies=[1.0, 2.0])
    second = measures([math.log(4.0), 0.0], [False, False], staleness=[1, 2], entropies=[0.0, 1.0])
    figures = token_figures([first, second])
    assert figures["trained_tokens"] == 4
    assert figures["staleness_counts"] == {"0": 2, "1": 1, "2": 1}
    assert (figures["staleness_mean"], figures["staleness_max"]) == (0.75, 2)
    # on the two tokens of the version trained from: Δ = ln 2 and 0
    assert figures["mismatch_k1"] == pytest.approx(-math.log(2) / 2)
    assert figures["mismatch_k3"] == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert figures["mismatch_max"] == pytest.approx(math.log(2))
    assert figures["ess"] == pytest.approx((2 + 1 + 4 + 1) ** 2 / (4 * (4 + 1 + 16 + 1)))
    assert (figures["mask_fraction"], figures["entropy"]) == (0.25, 1.0)


def test_mismatch_falls_back_to_all_tokens_and_does_not_cry_wolf():
    figures = token_figures([measures([0.5, 0.5], [False, False])])
    assert figures["mismatch_k3"] == pytest.approx(math.exp(0.5) - 1.5) and figures["mismatch_tokens"] == 0
    assert warnings(figures) == [], "with stale tokens alone it is the policy that moved"


def test_warnings_in_words():
    figures = {"mismatch_k3": 0.1, "mismatch_tokens": 5, "ess": 0.2, "mask_fraction": 0.6, "router_zero_overlap": 0.4}
    texts = warnings(figures)
    assert [text.split()[0] for text in texts] == ["mismatch_k3", "ess", "mask_fraction", "router_zero_overlap"]
    assert "0.1, above 0.015" in texts[0] and "0.2, below 0.3" in texts[1]
    assert warnings({"ess": 0.9, "mismatch_k3": 1e-4, "mismatch_tokens": 5, "router_zero_overlap": None}) == []


def test_huge_ratios_give_finite_figures():
    figures = token_figures([measures([800.0, -800.0], [True, True])])
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))
