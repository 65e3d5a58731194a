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
    """'sha256:...', or 'md5:...' where the public offers no better"""
    unpack: bool = True
    """an archive; else a file that is used as it is"""
    folder: str = ""
    """where in the root a plain file, or an archive's contents, go"""

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


def _fashion(name: str, checksum: str) -> Download:
    return Download(f"{ZALANDO}/{name}", f"sha256:{checksum}", unpack=False)


DOMAINS = {  # MD5 of the images' archive, of the training and of the test list
    "clipart": ("cd0d8f2d77a4e181449b78ed62bccf1e", "b4349693a7f9c05c53955725c47ed6cb",
                "f5ddbcfd657a3acf9d0f7da10db22565"),
    "infograph": ("720380b86f9e6ab4805bb38b6bd135f8", "379b50054f4ac2018dca4f89421b92d9",
                  "779626b50869edffe8ea6941c3755c71"),
    "painting": ("1ae32cdb4f98fe7ab5eb0a351768abfd", "7db0e7ca73ad9982f6e1f7f3ef372c0a",
                 "232b35dc53f26d414686ae579e38d9b5"),
    "quickdraw": ("bdc1b6f09f277da1a263389efe0c7a66", "b732ced3939ac8efdd8c0a889dca56cc",
                  "c1a828fdfe216fb109f1c0083a252c6f"),
    "real": ("dcc47055e8935767784b7162e7c7cca6", "8ebf02c2075fadd564705f0dc7cd6291",
             "6098816791c3ebed543c71ffa11b9054"),
    "sketch": ("658d8009644040ff7ce30bb2e820850f", "1233bd18aa9a8a200bf4cecf1c34ef3e",
               "d8a222e4672cfd585298aa14d02ea441"),
}  # fmt: skip
DOMAIN_ARCHIVES = tuple(
    Download(f"{BOSTON}/{'groundtruth/' if domain in ('clipart', 'painting') else ''}{domain}.zip", f"md5:{sums[0]}")
    for domain, sums in DOMAINS.items()
)
DOMAIN_LISTS = tuple(
    _list(f"{domain}_{split}.txt", f"md5:{sums[1 + number]}", f"{BOSTON}/domainnet/txt")
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
            _fashion("train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            _fashion("train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            _fashion("t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            _fashion("t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
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
    "manifest": Source("your own images, listed in a CSV or Parquet file, which is the root",
                       "a file with the columns path, label, split and, if you like, task"),
    "huggingface": Source("a data set of Hugging Face that `save_to_disk` wrote", "what it wrote"),
}  # fmt: skip
