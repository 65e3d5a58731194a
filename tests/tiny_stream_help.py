"""A stream that a method learns in a second: each class is a fixed image with noise, two classes per task."""

import torch
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.methods import METHODS, Setup, Task

CLASSES = 2  # per task


def tiny_vit(double=False):
    torch.manual_seed(0)
    model = create_model("vit", num_classes=0, **VIT["backbone_options"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return (model.double() if double else model).eval()


def images_of(task, count=16):
    """Images and labels of a task."""
    generator = torch.Generator().manual_seed(task)
    labels = torch.arange(count) % CLASSES
    means = torch.randn(CLASSES, 3, 16, 16, generator=generator)
    return means[labels] + 0.3 * torch.randn(count, 3, 16, 16, generator=generator), labels + CLASSES * task


def learn(name, options, tasks=2, epochs=12, lr=0.01, model=None, **setup):
    """The method after some tasks, each of one batch per epoch, and the losses of each task's epochs."""
    method = METHODS.get(name)(model or tiny_vit(), Setup(options=options, tasks=tasks, **setup))
    torch.manual_seed(0)
    losses = []
    for task in range(tasks):
        images, labels = images_of(task)
        method.start_task(Task(task, CLASSES, CLASSES * task, seed=task))
        trained = [p for named in method.named_parameters().values() for _, p in named]
        optimizer = method.wrap(torch.optim.Adam(trained, lr=lr))
        own = []
        for epoch in range(epochs):
            method.enter(method.phase(epoch, epochs))
            loss, _ = method.loss(images, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own.append((method.current.name, loss.item()))
        losses.append(own)
        method.finish_task([(images, labels)])
    return method, losses


@torch.no_grad()
def accuracy(method, task, among=None):
    """Share of a task's images that get the right class; `among`: of these labels only."""
    images, labels = images_of(task)
    scores = method.predict(images)
    if among is not None:
        scores = scores[:, among]
        labels = labels - among.start
    return (scores.argmax(1) == labels).double().mean().item()


def task_labels(task):
    return slice(CLASSES * task, CLASSES * (task + 1))
