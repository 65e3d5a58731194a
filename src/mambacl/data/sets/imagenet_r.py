"""ImageNet-R in the split of CODA-Prompt."""

from functools import partial

from mambacl.data.sets import DATASETS, SOURCES, Download, Source
from mambacl.data.sets.split_lists import from_public_lists, split_list

DATASETS.add("imagenet-r", partial(from_public_lists, "imagenet-r", ["imagenet-r"]))
SOURCES["imagenet-r"] = Source(
    "ImageNet-R in the split of CODA-Prompt",
    "imagenet-r/WNID/*.jpg and lists/imagenet_r_{train,val}.txt",
    (200, 24_000, 6000),
    downloads=(
        Download(
            "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
            "sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
        ),
    ),
    lists=(
        split_list("imagenet_r_train.txt", "bd1536ce73d52328d697d983652ce02eb10c5c9fc085d4b2434c67c32b81ee2c"),
        split_list("imagenet_r_val.txt", "c6719b71b1181cba536a16d77a3815295eaf3b9c844f5db4452b9bb6dac85d2f"),
    ),
)
