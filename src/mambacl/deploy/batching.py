"""Predicts images of different requests as one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from mambacl.deploy.predictor import Prediction, Predictor
from mambacl.deploy.serve_options import Refusal

WINDOW = 0.005  # seconds that the first image waits for others
WAITING = 1024  # images; more would wait longer than clients do


@dataclass(frozen=True)
class Job:
    model: Predictor
    image: Tensor
    """the model's input"""
    top: int
    unknown_below: float
    answer: asyncio.Future[Prediction]


class Batcher:
    """A thread computes; while it does, new images collect for the next batch. An image is predicted with the model
    that was current when its request came, whatever was loaded since."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: deque[Job] = deque()
        self._some = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "predict")
        self._task = asyncio.create_task(self._run())

    async def predict(
        self, model: Predictor, images: list[Tensor], top: int, unknown_below: float = 0.0
    ) -> list[Prediction]:
        if len(self._jobs) + len(images) > max(WAITING, len(images)):
            raise Refusal(503, "The server has too much to do: try again in a moment.", {"Retry-After": "1"})
        loop = asyncio.get_running_loop()
        jobs = [Job(model, image, top, unknown_below, loop.create_future()) for image in images]
        self._jobs.extend(jobs)
        self._some.set()
        try:
            return list(await asyncio.gather(*(job.answer for job in jobs)))
        finally:
            for job in jobs:
                job.answer.cancel()  # nobody waits for those that are left

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._some.wait()
            if len(self._jobs) < self.size:
                await asyncio.sleep(WINDOW if self.size > 1 else 0)
            batch = self._next()
            if not self._jobs:
                self._some.clear()
            if not batch:
                continue
            try:
                answers = await loop.run_in_executor(self._thread, _answers, batch)
            except Exception as error:  # these requests fail, the next ones go on
                for job in batch:
                    if not job.answer.done():
                        job.answer.set_exception(error)
                continue
            for job, answer in zip(batch, answers, strict=True):
                if not job.answer.done():
                    job.answer.set_result(answer)

    def _next(self) -> list[Job]:
        """Jobs for one model, without those that nobody waits for any more."""
        batch: list[Job] = []
        while self._jobs and len(batch) < self.size:
            if self._jobs[0].answer.done():
                self._jobs.popleft()
            elif batch and self._jobs[0].model is not batch[0].model:
                break
            else:
                batch.append(self._jobs.popleft())
        return batch

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._thread.shutdown()


def _answers(batch: list[Job]) -> list[Prediction]:
    found = batch[0].model.answers(torch.stack([job.image for job in batch]), max(job.top for job in batch))
    return [
        Prediction(answer.classes[: job.top], answer.probabilities[: job.top], answer.probability < job.unknown_below)
        for job, answer in zip(batch, found, strict=True)
    ]
