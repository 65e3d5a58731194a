"""What `mambacl bench` can measure. Does not import PyTorch, so that the help is fast."""

PARTS = {
    "scan": "the recurrence alone, forward and backward, by each backend",
    "roofline": "the least work of a scan, and how much longer the scan takes",
    "block": "one block, forward and backward, with and without the kernels",
    "step": "a training step: plain fine-tuning and Mamba-CL",
    "memory": "bytes that a step keeps for its backward pass; what accumulation and recomputing save",
    "projection": "projecting a step, compared with a loop over dense matrices",
    "decomposition": "decomposing after a task, compared with an SVD per parameter",
    "inference": "predicting one image at a time, and many",
    "freed": "predicting on a CPU, if freed memory is kept or returned to the system",
    "classifier": "what a classifier from statistics adds to the backbone's time",
    "run": "a complete run, from the files to the last evaluation",
}
