"""L2P, DualPrompt and CODA-Prompt give the numbers that were recorded from public code."""

import pytest
import torch
from prompt_recordings import FIRST, Place, Recording, as_coda, replay
from small_run import VIT

from mambacl.backbones import create_model
from mambacl.errors import UserError
from mambacl.features import FeatureOptions
from mambacl.methods import METHODS, Setup, Task
from mambacl.tuning.query import frozen_query


def start(method, values):
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)


def test_l2p():
    recording = Recording("l2p")
    c = recording.config
    options = {"variant": "public-code", "pool": c["pool"], "length": c["length"], "top_k": c["top_k"]}
    options |= {"pull": c["pull"], "by_majority": c["batchwise"]}
    method = METHODS.get("l2p")(recording.model(), Setup(options=options))
    start(
        method, [(method.pool.values, recording["init.prompt.pool"]), (method.pool.keys, recording["init.prompt.keys"])]
    )
    images, _ = recording.batch(0, 1)
    query = frozen_query(method.model, images)
    recording.near("task0.step1.query", query, FIRST)
    selected, similarity = method.pool.select(query, c["top_k"], by_majority=True)
    recording.near("task0.step1.cosine", similarity, FIRST)
    assert torch.equal(selected, recording["task0.step1.selected"])
    recording.near("task0.step1.feature", method.features(images), FIRST)
    places = {"prompt.pool": Place(lambda: method.pool.values), "prompt.keys": Place(lambda: method.pool.keys)}
    replay(recording, method, places, clip=c["clip"])


def test_l2p_plus_plus():
    """The variant of CODA-Prompt's code."""
    recording = Recording("l2p_plus_plus")
    pool, length, _ = recording.config["prompt_param"]
    options = {"variant": "coda", "pool": pool, "length": length}
    method = METHODS.get("l2p")(recording.model(), Setup(options=options))
    names = {"prompt.block0.pool": method.pool.values, "prompt.block0.keys": method.pool.keys}
    start(method, [(parameter, recording[f"task0.init.{name}"]) for name, parameter in names.items()])
    images, _ = recording.batch(0, 1)
    query = frozen_query(method.model, images)
    recording.near("task0.step1.query", query, FIRST)
    recording.near("task0.step1.block0.cosine", method.pool.select(query, 5)[1], FIRST)
    feature, pull = method.prompted(images)
    recording.near("task0.step1.feature", feature, FIRST)
    recording.near("task0.step1.block0.prompt_loss", -pull, FIRST)

    def started(task):
        if task:
            selected, _ = method.pool.select(frozen_query(method.model, recording["test.images"]), 5)
            assert torch.equal(selected, recording["task0.end.test_block0.selected"])

    places = {name: Place(lambda p=parameter: p) for name, parameter in names.items()}
    replay(recording, method, places, schedule=as_coda, started=started)


def test_dualprompt_as_the_port_has_it():
    recording = Recording("dualprompt_port")
    c = recording.config
    options = {
        "variant": "public-code",
        "pool": c["pool"],
        "shared_length": c["g_length"],
        "task_length": c["e_length"],
    }
    method = METHODS.get("dualprompt")(recording.model(), Setup(options={**options, "pull": c["pull"]}))
    (pool,) = method.pools

    def recorded(values):  # (pool, blocks, 2, ...) as (blocks, 2, pool, ...)
        return values.movedim(0, 2)

    start(
        method,
        [
            (method.shared.values, recording["init.g_prompt"]),
            (recorded(pool.values), recording["init.e_prompt"]),
            (pool.keys, recording["init.keys"]),
        ],
    )
    places = {
        "g_prompt": Place(lambda: method.shared.values),
        "e_prompt": Place(lambda: pool.values, recorded),
        "keys": Place(lambda: pool.keys),
    }

    def started(task):
        if task:
            recording.near(f"task{task}.init.e_prompt", recorded(pool.values), 1e-7)

    replay(recording, method, places, clip=c["clip"], started=started)


def in_halves(values, length):
    """A prefix (..., 2, n, heads, d) as rows (..., 2 n, c)."""
    return values.flatten(-2).flatten(-3, -2)


def test_dualprompt_as_coda_has_it():
    recording = Recording("dualprompt_coda_variant")
    pool, e_length, g_length = recording.config["prompt_param"]
    options = {"variant": "coda", "pool": pool, "shared_length": g_length // 2, "task_length": e_length // 2}
    method = METHODS.get("dualprompt")(recording.model(), Setup(options=options))
    places = {}
    for block in (0, 1):
        places[f"prompt.block{block}.g_prompt"] = Place(
            lambda: method.shared.values, lambda v, block=block: in_halves(v[block], g_length)
        )
    for place, block in enumerate((2, 3, 4)):
        own = method.pools[place]
        places[f"prompt.block{block}.e_prompt"] = Place(
            lambda own=own: own.values, lambda v: in_halves(v[:, 0], e_length)
        )
        places[f"prompt.block{block}.e_keys"] = Place(lambda own=own: own.keys)
    with torch.no_grad():
        for name, place in places.items():
            value, parameter = recording[f"task0.init.{name}"], place.parameter()
            if "keys" in name:
                parameter.copy_(value)
            else:
                split = value.unflatten(-1, (4, -1)).unflatten(-3, (2, -1))
                target = parameter[int(name[12])] if "g_prompt" in name else parameter[:, 0]
                target.copy_(split)
    replay(recording, method, places, schedule=as_coda)


def test_coda_prompt():
    recording = Recording("coda_prompt")
    size, length, penalty = recording.config["prompt_param"]
    options = {"variant": "public-code", "pool": size, "length": length, "penalty": penalty}
    method = METHODS.get("coda-prompt")(recording.model(), Setup(options=options, tasks=recording.config["tasks"]))
    pool, grow = method.pool, method.pool.grow
    names = {"components": pool.components, "keys": pool.keys, "attention": pool.gates}
    task = iter(range(3))

    def grow_as_recorded(count, seed, **rest):
        prefix = f"task{next(task)}.draw"
        draws = {n: torch.stack([recording[f"{prefix}.block{b}.{n}"] for b in range(5)]) for n in names}
        grow(
            count, seed, {"keys": draws["keys"], "gates": draws["attention"], "components": draws["components"]}, **rest
        )

    pool.grow = grow_as_recorded
    places = {
        f"prompt.block{b}.{n}": Place(lambda p=parameter: p, lambda v, b=b: v[b])
        for n, parameter in names.items()
        for b in range(5)
    }

    def started(task):
        for name, place in places.items():
            if f"task{task}.init.{name}" in recording:
                recording.near(f"task{task}.init.{name}", place.view(place.parameter()), 1e-9 if task == 0 else 1e-7)
        if task == 0:
            images, _ = recording.batch(0, 1)
            query = frozen_query(method.model, images)
            for block in range(5):
                recording.near(f"task0.step1.block{block}.weights", pool.weights(block, query), FIRST)

    replay(recording, method, places, schedule=as_coda, started=started)


# Mistakes, and other backbones


def tiny(family="vit", **options):
    sizes = VIT["backbone_options"] if family == "vit" else {"embed_dim": 16, "depth": 2}
    return create_model(family, num_classes=0, pretrained=False, **{**sizes, **options})


@pytest.mark.parametrize(
    "name, options, tasks, words",
    [
        ("dualprompt", {"pool": 3}, 4, r"a pool of 3 is too small for 4 tasks: set options\.pool to 4 or more"),
        ("coda-prompt", {"pool": 3}, 4, r"a pool of 3 components is too small for 4 tasks: set options\.pool to 4"),
        ("l2p", {"pool": 3}, 4, r"options\.top_k \(4\) is more than options\.pool \(3\)"),
        ("l2p", {"variant": "coda", "length": 5, "top_k": 2}, 0, r"options\.length must be even.*coda, got 5"),
        (
            "l2p",
            {"variant": "coda", "length": 4, "head_on": "prompts"},
            0,
            r"another variant than coda: leave it at auto",
        ),
        ("l2p", {"length": 100}, 0, r"400 prompt tokens are too many for a model of 17 tokens: choose 1 to 68"),
        ("dualprompt", {"task_length": 69}, 0, r"options\.task_length: 69 prompt tokens are too many"),
        ("coda-prompt", {"length": 140}, 0, r"half of options\.length: 70 prompt tokens are too many"),
        ("coda-prompt", {"length": 7}, 0, "length must be even"),
        (
            "coda-prompt",
            {"blocks": [0, 6]},
            0,
            r"options\.blocks = \[0, 6\] must list some of the model's blocks, 0 to 5",
        ),
        ("dualprompt", {"task_blocks": [1, 2]}, 0, r"block 1 is in options\.shared_blocks and options\.task_blocks"),
        ("l2p", {"variant": "jax"}, 0, "paper"),
    ],
)
def test_a_mistake_gets_one_sentence(name, options, tasks, words):
    with pytest.raises(UserError, match=words):
        METHODS.get(name)(tiny(), Setup(options=options, tasks=tasks))


@pytest.mark.parametrize("name", ["dualprompt", "coda-prompt"])
def test_prefixes_need_attention(name):
    with pytest.raises(UserError, match=f"'{name}' changes attention.*Vim has none.*use a vit backbone"):
        METHODS.get(name)(tiny("vim_nano"), Setup())


def test_a_full_pool_takes_no_further_task():
    for name, words in (("dualprompt", "room for 1 tasks"), ("coda-prompt", "pool of 1 components is full")):
        method = METHODS.get(name)(tiny(), Setup(options={"pool": 1}, tasks=1))
        method.start_task(Task(0, 2, 0, seed=0))
        with pytest.raises(UserError, match=words):
            method.start_task(Task(1, 2, 2, seed=1))


def test_other_depths_are_refused():
    setup = Setup(classifier="lda", features=FeatureOptions(depths="all"))
    with pytest.raises(UserError, match=r"'l2p' changes the final feature.*set features\.depths to final"):
        METHODS.get("l2p")(tiny(), setup)


@pytest.mark.parametrize("family", ["vim_nano", "defocus_mamba_nano"])
def test_l2p_on_a_mamba_backbone(family):
    """Its prompts train, and the head sees the class token."""
    options = {"mamba": {"intermediate_size": 64, "time_step_rank": 4}} if "defocus" in family else {}
    method = METHODS.get("l2p")(tiny(family, **options), Setup(options={"length": 2, "top_k": 2}))
    method.start_task(Task(0, 3, 0, seed=0))
    loss, _ = method.loss(torch.randn(3, 3, 32, 32), torch.arange(3))
    loss.backward()
    assert method.pool.values.grad.any() and method.pool.keys.grad.any()
    with pytest.raises(UserError, match="'prompts' needs a vit backbone"):
        METHODS.get("l2p")(method.model, Setup(options={"head_on": "prompts"}))


@pytest.mark.parametrize("variant", ["paper", "coda"])
def test_at_test_dualprompt_selects_by_key(variant):
    method = METHODS.get("dualprompt")(tiny(), Setup(options={"variant": variant, "pool": 2}))
    for task in range(2):
        method.start_task(Task(task, 2, 2 * task, seed=task))
    images = torch.randn(2, 3, 16, 16)
    query = frozen_query(method.model, images)
    with torch.no_grad():
        for pool in method.pools:
            pool.values[1] += 1.0
            pool.keys.copy_(query)  # the first image selects the first task's prompts, the second the second's
        found, of_tasks = method.features(images), [method.prompted(images, task)[0] for task in range(2)]
    assert torch.allclose(found[0], of_tasks[0][0]) and torch.allclose(found[1], of_tasks[1][1])
    assert not torch.allclose(found[1], of_tasks[0][1])
