"""DomainNet: all 345 classes in six domains, and the 200 classes, each from one domain, of the continual-learning
benchmarks."""

from functools import partial

from mambacl.data.sets import DATASETS, SOURCES, Download, Source
from mambacl.data.sets.split_lists import from_public_lists, split_list

FOLDERS = ("domainnet", "DomainNet")
CLEANED = ("clipart", "painting")  # whose archives were replaced by corrected ones
ADDRESS = "http://csr.bu.edu/ftp/visda/2019/multi-source"
DOMAINS = {  # SHA-256 of the images' archive, of the training and of the test list
    "clipart": (
        "f8f248a3e8bbc9868c523ae24e6601b4c2ad102afc60c0efeb4f3255df22354d",
        "affdadf5f95a7583e6b98030a3d35007e2613ee4dd942393c5a705ec2b429312",
        "62c8e36aaba1c41ad9e249099739707220a44c08f167b37ef420f34a31628a6b",
    ),
    "infograph": (
        "891e14f476317e97b6f06d6498c11d0a5b8d0c8b57210765ed9beb072da611fa",
        "36b44cbd41a2915e0dc73b4f4be8862a6f3c220f93c8d63fb2439beeae3aefda",
        "413cfa54ac92e7e6b242f4f09fbd9c8ace85c4deaf3cb6c81ff6b68264460136",
    ),
    "painting": (
        "fa47e6d405503ea0286cabd767f176bd30e988b63ddd7b9db16cf030c9770015",
        "f1da38d50a702fddf1329f85bc607d7a2abcae7e6aec75e1fd49cc1bd340d47b",
        "11472b13b5188e09f06918b12eebb660588c97a20e43e268d9b02e3e37eb8f97",
    ),
    "quickdraw": (
        "9f37df2a8c3733703dbb35ad9964202a65f675ca30137756457537536b485d84",
        "3a5edd3bc215772010eebc87f158707703dd7e48091d13b816af81326a9d1c0f",
        "2a00a60650a453c65c356da748fec54084a197272137c440e7d52d08947357bf",
    ),
    "real": (
        "d7fe010b430c5b510f85d657d38c4a1924822695fabea4fef57bd00dba251d63",
        "19d483256d24aef19e581b65eda8333fd918aef3eb733fe499ff384120e3a289",
        "2b3f75bcde309aeb5931292084b2162e936b5f189e3bb1ad716f0f74c460864c",
    ),
    "sketch": (
        "23a7dbae7016b343e934399beaa8a68728fb5e570ebe2c71df9b75cf91c499fc",
        "72f4bc6afa5702a1ccba800d0053c1427de87439dfaf246dbc9a2e71abfec54f",
        "3fb48fca18c507c4321f007c3f62b308ec232ff6928cbfe2af64e76ec366e840",
    ),
}


_archives = tuple(
    Download(f"{ADDRESS}/{domain if domain not in CLEANED else f'groundtruth/{domain}'}.zip", f"sha256:{sums[0]}")
    for domain, sums in DOMAINS.items()
)
DATASETS.add("domainnet-s200", partial(from_public_lists, "domainnet-s200", FOLDERS))
SOURCES["domainnet-s200"] = Source(
    "200 classes of DomainNet, each from one domain, as in CPrompt, VPT-NSP and Mamba-CL",
    "DOMAIN/CLASS/*.jpg (six domains) and lists/sdomain_{train,val}.txt",
    (200, 47_532, 20_450),
    downloads=_archives,
    lists=(
        split_list("sdomain_train.txt", "87671cd9a6309dc5e9ebfa8eab8c14abbc270d605c9430c7525ff8e9d7e7e74e"),
        split_list("sdomain_val.txt", "112d39337e19ea1b5b81f1a423145be007c5a42e16aeea84473a98c28462a8d2"),
    ),
)
DATASETS.add("domainnet-345", partial(from_public_lists, "domainnet-345", FOLDERS))
SOURCES["domainnet-345"] = Source(
    "all 345 classes of DomainNet, as in CODA-Prompt and InfLoRA",
    "DOMAIN/CLASS/*.jpg (six domains) and lists/DOMAIN_{train,test}.txt",
    (345, 409_832, 176_743),
    downloads=_archives,
    lists=tuple(
        split_list(f"{domain}_{split}.txt", sums[1 + number], f"{ADDRESS}/domainnet/txt")
        for number, split in enumerate(("train", "test"))
        for domain, sums in DOMAINS.items()
    ),
)
