"""Where the public data sets come from, what they must hold, and how they lie on disk.

Addresses and checksums only: neither images nor split lists are carried by the package.
"""

from dataclasses import dataclass

TORONTO = "https://www.cs.toronto.edu/~kriz"
BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
STANFORD = "http://cs231n.stanford.edu"
BOSTON = "http://csr.bu.edu/ftp/visda/2019/multi-source"
ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
MAMBA_CL = "https://raw.githubusercontent.com/zugexiaodui/mamba-cl/0ebac10c600ca7179174e2fa9bf2036218d48dba/tools"


@dataclass(frozen=True)
class Download:
    url: str
    checksum: str
    """'sha256:...'"""
    unpack: bool = True
    """an archive; else a file that is used as it is"""
    folder: str = ""
    """where in the root a plain file, or an archive's contents, go"""
    content: str = ""
    """of a .gz file that is used as it is, the checksum of what it holds, which may be compressed anew or not at all"""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    summary: str
    layout: str
    """what lies where under the root"""
    classes: int | None = None
    train: int | None = None
    test: int | None = None
    downloads: tuple[Download, ...] = ()
    lists: tuple[Download, ...] = ()


def _list(name: str, checksum: str, base: str = MAMBA_CL) -> Download:
    return Download(f"{base}/{name}", checksum, unpack=False, folder="lists")


def _fashion(name: str, checksum: str, content: str) -> Download:
    return Download(f"{ZALANDO}/{name}", f"sha256:{checksum}", unpack=False, content=f"sha256:{content}")


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
DOMAIN_ARCHIVES = tuple(
    Download(f"{BOSTON}/{'groundtruth/' if domain in ('clipart', 'painting') else ''}{domain}.zip", f"sha256:{sums[0]}")
    for domain, sums in DOMAINS.items()
)
DOMAIN_LISTS = tuple(
    _list(f"{domain}_{split}.txt", f"sha256:{sums[1 + number]}", f"{BOSTON}/domainnet/txt")
    for number, split in enumerate(("train", "test"))
    for domain, sums in DOMAINS.items()
)
IMAGENET_R_LISTS = (
    _list("imagenet_r_train.txt", "sha256:bd1536ce73d52328d697d983652ce02eb10c5c9fc085d4b2434c67c32b81ee2c"),
    _list("imagenet_r_val.txt", "sha256:c6719b71b1181cba536a16d77a3815295eaf3b9c844f5db4452b9bb6dac85d2f"),
)
SDOMAIN_LISTS = (
    _list("sdomain_train.txt", "sha256:87671cd9a6309dc5e9ebfa8eab8c14abbc270d605c9430c7525ff8e9d7e7e74e"),
    _list("sdomain_val.txt", "sha256:112d39337e19ea1b5b81f1a423145be007c5a42e16aeea84473a98c28462a8d2"),
)

SOURCES: dict[str, Source] = {
    "fashion-mnist-small": Source("part of Fashion-MNIST, in the package", "nothing", 10, 2500, 1000),
    "fashion-mnist": Source(
        "Fashion-MNIST, 28 x 28 pixels, grey", "train-images-idx3-ubyte.gz and its three companions, .gz or not",
        10, 60000, 10000,
        downloads=(
            _fashion("train-images-idx3-ubyte.gz",
                     "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                     "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
            _fashion("train-labels-idx1-ubyte.gz",
                     "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                     "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
            _fashion("t10k-images-idx3-ubyte.gz",
                     "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                     "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
            _fashion("t10k-labels-idx1-ubyte.gz",
                     "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                     "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
        ),
    ),
    "cifar100": Source(
        "CIFAR-100, 32 x 32 pixels", "cifar-100-python/{train,test,meta}", 100, 50000, 10000,
        downloads=(
            Download(f"{TORONTO}/cifar-100-python.tar.gz",
                     "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
        ),
    ),
    "imagenet-r": Source(
        "ImageNet-R in the split of CODA-Prompt", "imagenet-r/WNID/*.jpg and lists/imagenet_r_{train,val}.txt",
        200, 24000, 6000,
        downloads=(
            Download(f"{BERKELEY}/imagenet-r.tar",
                     "sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52"),
        ),
        lists=IMAGENET_R_LISTS,
    ),
    "domainnet-s200": Source(
        "200 classes of DomainNet, each from one domain, as in CPrompt, VPT-NSP and Mamba-CL",
        "DOMAIN/CLASS/*.jpg (six domains) and lists/sdomain_{train,val}.txt", 200, 47532, 20450,
        downloads=DOMAIN_ARCHIVES, lists=SDOMAIN_LISTS,
    ),
    "domainnet-345": Source(
        "all 345 classes of DomainNet, as in CODA-Prompt and InfLoRA",
        "DOMAIN/CLASS/*.jpg (six domains) and lists/DOMAIN_{train,test}.txt", 345, 409832, 176743,
        downloads=DOMAIN_ARCHIVES, lists=DOMAIN_LISTS,
    ),
    "tiny-imagenet": Source(
        "Tiny-ImageNet, 64 x 64 pixels; its validation images are the test images",
        "tiny-imagenet-200/{train/WNID/images,val/images,val/val_annotations.txt}", 200, 100000, 10000,
        downloads=(
            Download(f"{STANFORD}/tiny-imagenet-200.zip",
                     "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"),
        ),
    ),
    "tiny-imagenet-32": Source(
        "Tiny-ImageNet at 32 x 32 pixels in WebP sheets; not for comparison with published figures",
        "train-WNID.webp and val-NN.webp, 25 x 20 images each", 200, 100000, 10000,
    ),
    "folders": Source("your own images", "train/CLASS/* and test/CLASS/*"),
    "domain-folders": Source("your own images of several domains", "train/DOMAIN/CLASS/* and test/DOMAIN/CLASS/*"),
    "manifest": Source("your own images, listed in a CSV or Parquet file, which is the root",
                       "a file with the columns path, label, split and, if you like, task"),
    "huggingface": Source("a data set of Hugging Face that `save_to_disk` wrote", "what it wrote"),
}  # fmt: skip
