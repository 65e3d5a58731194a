"""Corrections of drift as public code computes them: every number of the recordings, in float64, within the tolerance
that each states. The order of operations is that of the recording's meta.json."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from mambacl.classifiers import Gaussian, Ridge
from mambacl.classifiers.drifts.adagauss import AdaGaussOptions, anti_collapse, network, shrunk, train
from mambacl.classifiers.drifts.base import pushed
from mambacl.classifiers.drifts.efc import elastic_shift, elastic_sum, penalty
from mambacl.classifiers.drifts.ldc import trained_map
from mambacl.classifiers.drifts.shift import kernel_shift
from mambacl.classifiers.gaussian import ADAGAUSS

COARSE = {"rtol": 1e-7, "atol": 1e-9}  # after steps
FINE = {"rtol": 1e-8, "atol": 1e-10}


def batches(recorded: dict[str, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    old, new = recorded["old_features"], recorded["new_features"]
    return list(zip(old.split(size), new.split(size), strict=True))


# SDC


@pytest.mark.parametrize("rule, floor", [("original", 0.0), ("floored", 1e-5)])
@pytest.mark.parametrize("sigma", range(3))
def test_sdc(sigma: int, rule: str, floor: float, goldens: Path) -> None:
    """github.com/yulu0724/SDC-IL at 4d9efc9, and with a floor github.com/alviur/ldc at e3ea3e9."""
    recorded = load_file(goldens / "sdc.safetensors")
    old, means = recorded["old_features"], recorded["old_means"]
    variance = float(recorded[f"sigma{sigma}.sigma"]) ** 2
    ours = means + kernel_shift(old, recorded["new_features"] - old, means, variance, floor)
    torch.testing.assert_close(ours, recorded[f"sigma{sigma}.{rule}.new_means"], **FINE)


# LDC


def test_ldc(goldens: Path) -> None:
    """github.com/alviur/ldc at e3ea3e9: batches of 10 in the recorded order, 20 epochs."""
    recorded = load_file(goldens / "ldc.safetensors")
    steps = batches(recorded, 10) * 20
    assert len(steps) == int(recorded["number_of_steps"])
    for count in (1, 3):
        found = trained_map(recorded["map_initial"], steps[:count], 1e-3)
        torch.testing.assert_close(found, recorded[f"map_after_{count}_steps"], **COARSE)
    found = trained_map(recorded["map_initial"], steps, 1e-3)
    torch.testing.assert_close(found, recorded["map_final"], **COARSE)
    torch.testing.assert_close(recorded["old_means"] @ found.T, recorded["new_means"], **COARSE)


# EFC


def test_efc(goldens: Path) -> None:
    """github.com/simomagi/elastic_feature_consolidation at 3ef9172. Its matrix leaves out the last batch of 5, which is
    incomplete: ours gets the images that are left."""
    recorded = load_file(goldens / "efc.safetensors")
    old, new, means = (recorded[name] for name in ("old_features", "new_features", "old_means"))
    features = recorded["matrix_features"]
    features = features[: len(features) // 5 * 5]
    weight, bias = recorded["classifier.weight"], recorded["classifier.bias"]
    matrix = elastic_sum(features, lambda f: F.linear(f, weight, bias)) / len(features)
    torch.testing.assert_close(matrix, recorded["feature_matrix"], **FINE)
    ours = new.clone().requires_grad_()
    loss = penalty(ours, old, recorded["feature_matrix"], 10.0, 0.1)
    torch.testing.assert_close(loss.detach(), recorded["penalty"], **FINE)
    loss.backward()
    torch.testing.assert_close(ours.grad, recorded["penalty_gradient"], **FINE)
    drift = elastic_shift(old, new - old, means, recorded["feature_matrix"], 0.2**2)
    torch.testing.assert_close(drift, recorded["drift"], **FINE)
    torch.testing.assert_close(means + drift, recorded["new_means"], **FINE)


# AdaGauss


def test_the_term_against_collapse(goldens: Path) -> None:
    """github.com/grypesc/AdaGauss at 2487d07."""
    recorded = load_file(goldens / "adagauss.safetensors")
    features = recorded["anti_collapse.input"].requires_grad_()
    loss = anti_collapse(features, 1.0)
    torch.testing.assert_close(loss.detach(), recorded["anti_collapse.loss"], **COARSE)
    loss.backward()
    torch.testing.assert_close(features.grad, recorded["anti_collapse.gradient"], **COARSE)


def test_adagauss(goldens: Path) -> None:
    """github.com/grypesc/AdaGauss at 2487d07: 10 epochs of consecutive full batches of 16."""
    recorded = load_file(goldens / "adagauss.safetensors")
    torch.testing.assert_close(
        shrunk(recorded["old_covariances_raw"], 3.0), recorded["old_covariances_shrunk"], **COARSE
    )
    options = AdaGaussOptions(hidden=20)
    mapping = network(5, options).double()
    with torch.no_grad():
        for place, parameter in enumerate(mapping.parameters()):
            parameter.copy_(recorded[f"map_initial.{place}"])
    terms = train(mapping, [batches(recorded, 16)] * 10, options)
    torch.testing.assert_close(torch.tensor(terms).double(), recorded["anti_collapse_losses"], **COARSE)
    for place, parameter in enumerate(mapping.parameters()):
        torch.testing.assert_close(parameter.detach(), recorded[f"map_final.{place}"], **COARSE)
    found = [pushed(samples, mapping) for samples in recorded["gaussian_samples"]]
    covariances = shrunk(torch.stack([covariance for _, covariance in found]), 3.0)
    torch.testing.assert_close(torch.stack([mean for mean, _ in found]), recorded["new_means"], **COARSE)
    torch.testing.assert_close(covariances, recorded["new_covariances"], **COARSE)


def test_adagauss_distances(goldens: Path) -> None:
    """The classifier with the rule's settings, on the adapted Gaussians. These are shrunk already, so it adds nothing;
    from covariances that are not, its own shrinkage gives the same."""
    recorded = load_file(goldens / "adagauss.safetensors")
    distances = recorded["mahalanobis.squared_distances"]
    for variance in (0.0, ADAGAUSS.variance):
        covariances = recorded["new_covariances"]
        if variance:  # undo it: shrinking multiplies the mean variance by 1 + 3
            mean = covariances.diagonal(dim1=1, dim2=2).mean(1) / (1 + variance)
            covariances = covariances - variance * mean[:, None, None] * torch.eye(5, dtype=torch.float64)
        classifier = Gaussian(5, **{**vars(ADAGAUSS), "variance": variance})
        classifier.add_task(3)
        classifier.statistics.counts += 50
        classifier.statistics.sums = 50 * recorded["new_means"]
        classifier.set_covariances(covariances)
        used = classifier.covariances()
        torch.testing.assert_close(used, recorded["new_covariances_normalised"], **COARSE)
        torch.testing.assert_close(-2 * classifier.scores(recorded["mahalanobis.features"]), distances, **COARSE)


# DPCR


def test_dpcr(goldens: Path) -> None:
    """github.com/RHe502/ICML25-DPCR: statistics, map and ridge classifier of three tasks. The stored moments are of
    clean images, those in a task's classifier of its training images: two classifiers, of which the first goes on."""
    recorded = load_file(goldens / "dpcr.safetensors")
    stored = Ridge(6, rule="dpcr", ridge=5.0, drift="dpcr")
    moments, gamma = Gaussian(6, drift="dpcr"), 5.0 * torch.eye(6, dtype=torch.float64)
    for task in range(3):
        at = f"task{task}."
        labels = recorded[at + "labels"]
        features = recorded[at + ("new_features" if task else "features")]
        if task:
            pairs = [(recorded[at + "old_features"], features, labels)]
            found = stored.follow(pairs)
            assert found.matrix is not None
            torch.testing.assert_close(found.matrix, recorded[at + "map"], **COARSE)
            moments.follow(pairs)
        used = copy.deepcopy(stored)
        used.update(features, labels)
        used.finish_task()
        gram = used._gram().block(slice(0, 6), torch.float64) + gamma
        if task:
            torch.testing.assert_close(gram, recorded[at + "regularised_moment"], **COARSE)
            torch.testing.assert_close(used.sums.T, recorded[at + "cross_correlation"], **COARSE)
        weights = used.state_dict()["weights"]
        torch.testing.assert_close(weights, recorded[at + "classifier_weight"], **COARSE)
        test = features[:4]
        torch.testing.assert_close(used.scores(test), test @ recorded[at + "classifier_weight"].T, **COARSE)
        for label in labels.unique().tolist():
            clean = recorded[f"{at}class{label}.clean_features"] if task else features[labels == label]
            for classifier in (stored, moments):
                classifier.update(clean, torch.full((len(clean),), label))
        torch.testing.assert_close(moments.class_means()[0], recorded[at + "class_means"], **COARSE)
        torch.testing.assert_close(moments.statistics.moments, recorded[at + "class_moments"], **COARSE)
        torch.testing.assert_close(stored.class_means()[0], recorded[at + "class_means"], **COARSE)
        identity = torch.eye(6, dtype=torch.float64).expand_as(recorded[at + "class_projectors"])
        torch.testing.assert_close(recorded[at + "class_projectors"], identity, **COARSE)  # which is why we have none


def test_the_recorded_maps_have_a_direction(goldens: Path) -> None:
    """So that the comparisons above would see a transposed map."""
    final = load_file(goldens / "ldc.safetensors")["map_final"]
    matrix = load_file(goldens / "dpcr.safetensors")["task1.map"]
    for found in (final, matrix):
        assert (found - found.T).norm() > 0.1
