import math

import numpy as np
import pytest

from rollmill.training.diagnostics import TokenMeasures, mismatch_figures, token_figures, warnings


def measures(log_weights: list[float], **changes: list[float]) -> TokenMeasures:
    size = len(log_weights)
    arrays = {
        "kept": [True] * size,
        "clipped": [False] * size,
        "vetoed": [False] * size,
        "advantages": [1.0] * size,
        "entropies": [1.0] * size,
        "staleness": [0] * size,
        "queued": [0] * size,
        **changes,
    }
    return TokenMeasures(np.array(log_weights), **{name: np.array(values) for name, values in arrays.items()})


def test_figures_computed_by_hand():
    first = measures([math.log(2.0), 0.0], kept=[True, False], staleness=[0, 0], entropies=[1.0, 2.0])
    second = measures([math.log(4.0), 0.0], staleness=[1, 2], entropies=[0.0, 1.0])
    figures = token_figures([first, second])
    assert figures["trained_tokens"] == 4
    assert figures["staleness_counts"] == {"0": 2, "1": 1, "2": 1}
    assert (figures["staleness_mean"], figures["staleness_max"]) == (0.75, 2)
    # over all four tokens: Δ = ln 2, 0, ln 4, 0
    assert figures["drift_k1"] == pytest.approx(-math.log(8) / 4)
    assert figures["drift_k3"] == pytest.approx((2 - 1 + 4 - 1 - math.log(8)) / 4)
    assert figures["drift_max"] == pytest.approx(math.log(4))
    assert figures["ess"] == pytest.approx((2 + 1 + 4 + 1) ** 2 / (4 * (4 + 1 + 16 + 1)))
    assert (figures["mask_fraction"], figures["entropy"]) == (0.25, 1.0)
    assert figures["kl_entropy"] == figures["drift_k3"]  # over a mean entropy of 1
    assert figures["drift_outside"] == 0.25, "a ratio of 4 is outside, one of exactly 2 is not"
    assert not any(name.startswith("mismatch") for name in figures), "drift is not mismatch"


def test_masks_and_clips_are_counted_by_sign():
    # masked: two of three tokens to be made likelier, none to be made less likely; clipped: one of each
    figures = token_figures(
        [
            measures(
                [0.0] * 4, advantages=[1, 1, 2, -1], kept=[False, False, True, True], clipped=[True, False, False, True]
            ),
            measures([0.0] * 4, advantages=[-1, -1, -1, 0], vetoed=[True, True, False, False]),
        ]
    )
    assert figures["mask_fraction"] == 2 / 8
    assert (figures["mask_fraction_positive"], figures["mask_fraction_negative"]) == (pytest.approx(2 / 3), 0.0)
    assert figures["clip_fraction"] == 2 / 8
    assert (figures["clip_fraction_positive"], figures["clip_fraction_negative"]) == (pytest.approx(1 / 3), 1 / 4)
    assert figures["veto_share"] == 2 / 8
    assert token_figures([measures([0.0])])["mask_fraction_negative"] is None, "there was no such token"


def test_staleness_is_split_into_queue_and_flight():
    # one trajectory: sampled by versions 3, 3, 4, 5, trained from 6; after its last token one version was published
    figures = token_figures([measures([0.0] * 4, staleness=[3, 3, 2, 1], queued=[1, 1, 1, 1])])
    assert (figures["staleness_queue"], figures["staleness_flight"]) == (1.0, (2 + 2 + 1 + 0) / 4)
    assert figures["staleness_queue"] + figures["staleness_flight"] == figures["staleness_mean"]


def test_mismatch_computed_by_hand():
    figures = mismatch_figures(np.array([math.log(2.0), 0.0]), {"no weights": 3, "no reason": 0})
    assert figures["mismatch_k1"] == pytest.approx(-math.log(2) / 2)
    assert figures["mismatch_k3"] == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert figures["mismatch_max"] == pytest.approx(math.log(2)) and figures["mismatch_outside"] == 0
    assert figures["mismatch_tokens"] == 2 and figures["mismatch_left_out"] == {"no weights": 3}


def test_nothing_measured_is_not_agreement():
    figures = {**token_figures([]), **mismatch_figures(np.empty(0), {})}
    assert figures["mismatch_tokens"] == figures["trained_tokens"] == 0
    for name in ("k1", "k3", "p99", "max", "outside"):
        assert figures[f"mismatch_{name}"] is None and figures[f"drift_{name}"] is None
    assert token_figures([]).keys() == token_figures([measures([0.0])]).keys()
    assert warnings(figures) == []


def test_warnings_name_the_figure_and_the_cause():
    figures = {"mismatch_k3": 0.1, "ess": 0.2, "mask_fraction": 0.6, "router_zero_overlap": 0.4}
    texts = warnings(figures)
    assert [text.split()[0] for text in texts] == ["mismatch_k3", "ess", "mask_fraction", "router_zero_overlap"]
    assert "0.1, above 0.015" in texts[0] and "0.2, below 0.3" in texts[1]
    assert warnings({"ess": 0.9, "mismatch_k3": 1e-4, "drift_k3": 0.1, "router_zero_overlap": None}) == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"mismatch_outside": 0.02}, "less than half as likely"),
        ({"groups_missing": 1}, "the step ran short"),
        ({"abandoned_share": 0.6}, "not on the way to an outcome"),
        ({"masked_stale": 3}, "Groups of this run never have any"),
        ({"ess": 0.2, "staleness_queue": 0.5, "staleness_flight": 2.0}, "arises in flight"),
        ({"ess": 0.2, "staleness_queue": 2.0, "staleness_flight": 0.5}, "arises in the queue"),
        ({"mask_fraction": 0.4, "mask_fraction_positive": 0.6}, "good answers are masked"),
        ({"mask_fraction": 0.4, "mask_fraction_negative": 0.6}, "bad answers are masked"),
        ({"clip_fraction": 0.7}, "most ratios are clipped"),
        ({"veto_share": 0.2}, "nearly impossible"),
        ({"entropy": 0.001}, "hardly explores"),
        ({"router_replaced": 0.1}, "finds recorded experts implausible"),
        ({"experts_dead": 0.1}, "some experts get no token"),
        ({"expert_load_max": 20.0}, "many times its share"),
    ],
)
def test_every_limit_names_a_likely_cause(figures: dict[str, float], words: str):
    (text,) = warnings(figures)
    assert words in text and "{" not in text


def test_one_cause_is_reported_once():
    assert len(warnings({"mask_fraction": 0.7, "mask_fraction_positive": 0.8, "mask_fraction_negative": 0.6})) == 1
    assert len(warnings({"mismatch_k3": 0.1, "mismatch_outside": 0.3})) == 1


def test_huge_ratios_give_finite_figures():
    figures = token_figures([measures([800.0, -800.0])])
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))


def test_with_exact_numerics_any_difference_is_a_warning():
    figures = {"mismatch_max": 1e-7}
    assert warnings(figures) == [] == warnings({"mismatch_max": 0.0}, exact=True) == warnings({}, exact=True)
    [text] = warnings(figures, exact=True)
    assert "same kind of CPU" in text
