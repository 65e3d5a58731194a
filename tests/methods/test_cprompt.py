"""CPrompt gives the numbers that were recorded from its public code; CPrompt-KAC has no recording."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from prompt_recordings import FIRST, LATER, Place, Recording, replay
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.query import frozen_query


def tiny(family="vit", **options):
    torch.manual_seed(0)
    sizes = VIT["backbone_options"] if family == "vit" else {"embed_dim": 16, "depth": 2}
    model = create_model(family, num_classes=0, pretrained=False, **{**sizes, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # well above the small values that training starts from
                parameter.normal_(std=0.3)
    return model


def recorded_method(recording):
    c = recording.config
    options = {"variant": "public-code", "length": c["prompt_len"], "temperature": c["tau"], "margin": c["margin"]}
    options |= {"smoothing": c["alpha"]}
    setup = Setup(options=options, tasks=c["tasks"], classes=c["tasks"] * c["classes_per_task"])
    return METHODS.get("cprompt")(recording.model(), setup)


def sgd(decay):
    def make(method, lr):
        trained = [p for named in method.named_parameters().values() for _, p in named]
        return torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=decay)

    return make


def test_three_tasks_as_recorded():
    recording = Recording("cprompt")
    method = recorded_method(recording)
    for name in list(recording.tensors):  # it has each task's own head: `replay` looks at the task's rows of one head
        if found := re.match(r"task(\d)\..*(?<!aux_)head\.(weight|bias)$", name):
            own = recording[name]
            recording.tensors[name] = torch.cat((own.new_zeros(int(found[1]) * len(own), *own.shape[1:]), own))
    for part in ("weight", "bias"):
        recording.tensors[f"init.head.{part}"] = torch.cat(
            [recording[f"task{task}.init.head.{part}"][3 * task :] for task in range(3)]
        )
    places = {
        "keys": Place(lambda: method.keys.current),
        "aux_head.weight": Place(lambda: method.aux.weight),
        "aux_head.bias": Place(lambda: method.aux.bias),
        "prompt1": Place(lambda: method.prompts.current, lambda v: v[0, 0]),
        "prompt2": Place(lambda: method.prompts.current, lambda v: v[0, 1]),
    }
    step = iter(range(1, 4))

    def draw(bound, count):
        name = f"task{method.task}.step{method.at_step}.drawn_prompt"
        assert bound == method.task + 1 and count == len(recording[name])
        return recording[name]

    def started(task):
        nonlocal step
        step = iter(range(1, 4))
        with torch.no_grad():
            if task == 0:
                method.keys.current.copy_(recording["init.keys"])
                method.prompts.current[0, 0] = recording["task0.init.prompt1"]
                method.prompts.current[0, 1] = recording["task0.init.prompt2"]
            else:
                for name in ("prompt1", "prompt2"):
                    recording.near(f"task{task}.init.{name}", places[name].view(method.prompts.current), LATER)
            method.aux.weight.copy_(recording[f"task{task}.init.aux_head.weight"])
            method.aux.bias.copy_(recording[f"task{task}.init.aux_head.bias"])
        images, labels = recording.batch(task, 1)
        first, tolerance = f"task{task}.step1.", FIRST if task == 0 else LATER
        own = method.prompted(images, method.prompts.current)
        drawn = method.prompted(images, method.prompts.rows()[recording[first + "drawn_prompt"]])
        recording.near(first + "aux_feature", own, tolerance)
        recording.near(first + "aux_logits", method.aux(own), tolerance)
        recording.near(first + "key_logits", method.key_cosines(images), tolerance)
        recording.near(first + "head_logits", method.heads.task_logits(drawn), tolerance)
        recording.near(first + "loss.head", method.task_loss(drawn, labels)[0], tolerance)
        recording.near(first + "loss.aux", F.cross_entropy(method.aux(own), labels - 3 * task), tolerance)
        recording.near(first + "loss.key", F.cross_entropy(method.key_cosines(images), labels), tolerance)

    loss = method.loss

    def counted(images, labels):
        method.at_step = next(step)
        name = f"task{method.task}.step{method.at_step}.lr"
        epochs = recording.config["steps"]
        lr = 0.5 * recording.config["lr"] * (1 + math.cos(math.pi * (method.at_step - 1) / epochs))
        recording.near(name, torch.tensor(lr, dtype=torch.float64), FIRST)
        return loss(images, labels)

    method.draws.below, method.loss = draw, counted
    predict = method.predict

    def tested(images):
        name = f"task{method.task}.end.test_"
        cosine = method.key_cosines(images)
        recording.near(name + "key_cosine", cosine, LATER)
        assert torch.equal(cosine.argmax(1) // 3, recording[name + "task"])
        return predict(images)

    method.predict = tested

    def cosine(epoch, epochs):
        return 0.5 * (1 + math.cos(math.pi * epoch / epochs))

    replay(
        recording,
        method,
        places,
        schedule=cosine,
        optimizer=sgd(recording.config["weight_decay"]),
        started=started,
    )
    parameters = ("head.weight", "head.bias", "prompt1", "prompt2", "keys")
    left = [n for n in recording.tensors if ".step" in n and n.endswith(parameters) and n not in recording.compared]
    assert not left


def learner(name="cprompt", tasks=2, family="vit", **options):
    method = METHODS.get(name)(tiny(family), Setup(options={"length": 3, **options}))
    for task in range(tasks):
        method.start_task(Task(task, 2 + task, 2 * task, seed=task))
    return method


def test_smoothing_by_hand():
    """Uneven heads; for some images the current head is surer than the earlier ones by the margin, for others not."""
    method = learner(tasks=3, temperature=2.0, margin=0.1)
    features = torch.randn(8, method.num_features, generator=torch.Generator().manual_seed(3)) * 3
    outputs = [head(features).tolist() for head in method.heads.heads]
    expected, temperatures = 0.0, set()
    for earlier in outputs[:-1]:
        for image, logits in enumerate(earlier):
            t = 1.0 if max(outputs[-1][image]) > max(logits) + 0.1 else 2.0
            temperatures.add(t)
            soft = [math.exp(z / t) for z in logits]
            total = math.log(sum(math.exp(z) for z in logits))
            expected += sum(w / sum(soft) * (total - z) for w, z in zip(soft, logits, strict=True)) / 8 / 2
    assert temperatures == {1.0, 2.0}
    assert float(method.rough(features)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("variant", ["paper", "public-code"])
def test_an_image_gets_the_prompts_of_the_task_with_the_nearest_key(variant):
    method = learner(variant=variant)
    images = torch.randn(2, 3, 16, 16)
    query = frozen_query(method.model, images, normed=False)
    with torch.no_grad():
        method.prompts.current.normal_()
        keys = method.keys.rows()
        keys[1], keys[4] = query[0], 5 * query[1]  # of the first and of the second task, whatever their length
        rows = len(method.keys.earlier)
        method.keys.earlier.copy_(keys[:rows])
        method.keys.current.copy_(keys[rows:])
        found = method.features(images)
        of_tasks = [method.prompted(images, prompts[None]) for prompts in method.prompts.rows()]
    torch.testing.assert_close(found[0], of_tasks[0][0])
    torch.testing.assert_close(found[1], of_tasks[1][1])
    assert not torch.allclose(found[1], of_tasks[0][1])


def test_the_variants_differ_in_the_keys_that_train():
    method, public = learner(), learner(variant="public-code")
    assert method.keys.earlier.shape == (2, 16) and method.keys.current.shape == (3, 16)
    assert public.keys.earlier.shape == (0, 16) and public.keys.current.shape == (5, 16)
    for one in (method, public):
        new = one.keys.rows()[2:]
        torch.testing.assert_close(new @ new.T, torch.eye(3))
        one.loss(torch.randn(3, 3, 16, 16), torch.tensor([2, 3, 4]))[0].backward()
        gradient = one.keys.current.grad
        assert gradient[-3:].all(1).all() and not gradient[:-3].any()


def test_answers_need_no_auxiliary_head():
    method, images = learner(), torch.randn(2, 3, 16, 16)
    state, task_state = method.for_answers(method.state_dict(), method.task_state_dict())
    assert sum(t.numel() for t in state.values()) == sum(t.numel() for t in method.state_dict().values()) - 3 * 17
    other = METHODS.get("cprompt")(tiny(), Setup(options={"length": 3}))
    other.load_state_dict(state)
    assert torch.equal(other.predict(images), method.predict(images)) and not task_state


def test_prompts_and_keys_of_earlier_tasks_stay():
    method = learner()
    before = method.prompts.earlier.clone(), method.keys.earlier.clone(), method.heads.heads[0].weight.clone()
    optimizer = sgd(0.1)(method, 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        method.loss(torch.randn(3, 3, 16, 16), torch.tensor([2, 3, 4]))[0].backward()
        optimizer.step()
    after = method.prompts.earlier, method.keys.earlier, method.heads.heads[0].weight
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(method.prompts.current, before[0])


@pytest.mark.parametrize("family", ["vim_nano", "defocus_mamba_nano"])
def test_on_a_mamba_backbone(family):
    method = METHODS.get("cprompt")(
        create_model(family, num_classes=0, pretrained=False, embed_dim=16, depth=2), Setup(options={"length": 3})
    )
    assert method.second == 1
    method.start_task(Task(0, 3, 0, seed=0))
    method.loss(torch.randn(3, 3, 32, 32), torch.arange(3))[0].backward()
    assert method.prompts.current.grad[0].flatten(1).any(1).all()


def test_cprompt_kac_is_cprompt_with_other_heads():
    """The same auxiliary and key losses; a head of zeros answers nothing, so that the rest is log 2."""
    linear, kac = learner(tasks=1), learner("cprompt-kac", tasks=1)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 1, 0])
    feature = linear.prompted(images, linear.prompts.current)
    rest = linear.loss(images, labels)[0] - F.cross_entropy(linear.heads.task_logits(feature), labels)
    torch.testing.assert_close(kac.loss(images, labels)[0], rest + math.log(2))
    assert kac.classifier.name == "kac" and not kac.classifier.options.shared
    kac.start_task(Task(1, 2, 2, seed=1))
    assert kac.heads.heads[0].norm.weight is not kac.heads.heads[1].norm.weight
    assert not any(p.requires_grad for p in kac.heads.heads[0].parameters())
    other = METHODS.get("cprompt-kac")(tiny(), Setup(classifier="lda", options={"length": 3}))
    assert other.heads.name == "kac" and not other.heads.options.shared


@pytest.mark.parametrize("name", ["cprompt", "cprompt-kac"])
def test_a_tiny_stream_is_learned(name):
    """Two tasks of two patterns: each head tells its classes apart, and the keys find most images' task."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(4, 3, 16, 16, generator=generator)
    method = METHODS.get(name)(tiny(), Setup(options={"length": 3}))
    for task in range(2):
        method.start_task(Task(task, 2, 2 * task, seed=task))
        optimizer = sgd(0.0)(method, 0.05)
        for _ in range(30):
            labels = torch.arange(8) % 2 + 2 * task
            images = patterns[labels] + 0.1 * torch.randn(8, 3, 16, 16, generator=generator)
            optimizer.zero_grad()
            method.loss(images, labels)[0].backward()
            optimizer.step()
    labels = torch.arange(40) % 4
    images = patterns[labels] + 0.1 * torch.randn(40, 3, 16, 16, generator=generator)
    with torch.no_grad():
        scores, tasks = method.predict(images).view(40, 2, 2), method.key_cosines(images).argmax(1) // 2
    within = scores[torch.arange(40), labels // 2].argmax(1)
    assert (within == labels % 2).float().mean() > 0.9  # chance is 0.5
    assert (tasks == labels // 2).float().mean() > 0.7  # chance is 0.5


@pytest.mark.parametrize(
    "options, known, words",
    [
        ({"length": 69}, None, r"cprompt: options\.length: 69 prompt tokens are too many for a model of 17 tokens"),
        ({"second_block": 6}, None, r"cprompt: options\.second_block must be from 1 to 5, got 6"),
        ({"temperature": 0.0}, None, "temperature must be positive"),
        ({"variant": "code"}, None, "public-code"),
        ({}, torch.nn.Linear(16, 2), "learns a key for each class from its images: leave out known_classes"),
    ],
)
def test_a_mistake_gets_one_sentence(options, known, words):
    with pytest.raises(UserError, match=words):
        METHODS.get("cprompt")(tiny(), Setup(options=options, known_classifier=known))
