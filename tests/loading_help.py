"""What the tests of weights from files share."""

import torch


def same(model, state):
    own = model.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in state.items())
