"""L2P, DualPrompt and CODA-Prompt give the numbers that were recorded from public code."""

import torch
from prompt_recordings import FIRST, Place, Recording, as_coda, replay

from mambacl.methods import METHODS, Setup
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
