"""Updates that stay inside the leading directions of a covariance."""

import pytest
import torch

from mambacl.nullspace.blocks import Part
from mambacl.nullspace.principal import PrincipalSpace, principal


def covariance(values):
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(0)).double())[0]
    return Q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ Q.T, Q


@pytest.mark.parametrize("share, kept", [(0.5, 1), (0.6, 2), (0.85, 3), (1.0, 4), (0.01, 1)])
def test_directions_that_hold_a_share(share, kept):
    """Of 5, 3, 1 and 1: either basis, of few or of many directions, gives the same projector."""
    matrix, Q = covariance([5.0, 3.0, 1.0, 1.0])
    found = principal(matrix, share + (-1e-9 if share in (0.5, 1.0) else 0))
    assert found.rank == kept and found.basis.shape[1] == min(kept, 4 - kept)
    if kept != 3:  # the last two are equal
        torch.testing.assert_close(found.projector(1.0, "none").dense(), Q[:, :kept] @ Q[:, :kept].T)
    scaled = found.projector(1.0, "frobenius").dense()
    assert abs(scaled.norm() - 1) < 1e-12


@pytest.mark.parametrize("frobenius", [True, False])
def test_steps_from_confine_to_forget(frobenius):
    matrix, Q = covariance([5.0, 3.0, 0.5, 0.1])
    named = {"A": torch.nn.Parameter(torch.zeros(2, 4).double()), "B": torch.nn.Parameter(torch.zeros(4, 2).double())}
    space = PrincipalSpace({"x": [Part("linear", "A"), Part("linear", "B", side="left")]}, frobenius)
    optimizer = torch.optim.SGD(named.values(), lr=1.0)
    space.wrap(optimizer, named)
    P = Q[:, :2] @ Q[:, :2].T / (2**0.5 if frobenius else 1)

    def step():
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        gradients = {name: torch.randn_like(parameter) for name, parameter in named.items()}
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        optimizer.step()
        return gradients, {name: parameter.detach() - before[name] for name, parameter in named.items()}

    gradients, moved = step()
    assert all(torch.equal(moved[name], -gradients[name]) for name in named)
    space.confine({"x": principal(matrix, 0.9)}, named)
    other = PrincipalSpace(space.parts, frobenius)
    other.load_state_dict(space.state_dict(), named)
    assert other.spaces["x"].rank == 2 and torch.equal(other.spaces["x"].basis, space.spaces["x"].basis)
    gradients, moved = step()
    torch.testing.assert_close(moved["A"], -gradients["A"] @ P)
    torch.testing.assert_close(moved["B"], -P @ gradients["B"])
    space.forget()
    assert not space.state_dict()
    gradients, moved = step()
    torch.testing.assert_close(moved["A"], -gradients["A"])
