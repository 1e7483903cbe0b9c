"""What can be downloaded: one row a dataset, with its files, their addresses, sizes and checksums where they are known, license and citation.

Sizes and checksums are those of the files as TensorFlow Datasets, Hugging Face Datasets or the publishers themselves have recorded them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RemoteFile:
    """A file that is published somewhere."""

    address: str
    path: str
    """Where it goes below the folder of the download; of an archive to unpack, the folder of what is taken out."""
    size: int | None = None
    """Bytes, where they are known."""
    checksum: str = ""
    """As it is published: `sha256:` or `sha1:` and the hex digits; empty where there is none."""
    unpack: str = ""
    """Of a zip archive, which members to take: a folder and a pattern of names, `CoLA/*.tsv`; the archive itself is not kept."""


@dataclass(frozen=True)
class Dataset:
    """A row of the table."""

    name: str
    summary: str
    license: str
    citation: str
    variants: Mapping[str, tuple[RemoteFile, ...]] = field(default_factory=dict)
    """What can be chosen, and the files of each; of Wikipedia and of other books they are made when they are asked for."""
    default: tuple[str, ...] = ()
    """The variants that are got when none is named."""
    pause: float = 0.0
    """Seconds between two files, where the publisher asks for that."""


GLUE_FOLDERS = {
    "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP", "mnli": "MNLI", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI",
}  # fmt: skip
"""The folder of each GLUE task, as its archive has it."""
_GLUE_ARCHIVES = {
    "cola": ("CoLA.zip", 376_971, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    "sst2": ("SST-2.zip", 7_439_277, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    "qqp": ("QQP-clean.zip", 41_696_084, "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    "stsb": ("STS-B.zip", 802_872, "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
    "mnli": ("MNLI.zip", 312_783_507, "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
    "qnli": ("QNLIv2.zip", 10_627_589, "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    "rte": ("RTE.zip", 697_150, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    "wnli": ("WNLI.zip", 28_999, "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
}
_FACEBOOK = "https://dl.fbaipublicfiles.com"
_SENTEVAL = f"{_FACEBOOK}/senteval/senteval_data"
_MRPC = (
    RemoteFile(
        f"{_SENTEVAL}/msr_paraphrase_train.txt",
        "glue/MRPC/msr_paraphrase_train.txt",
        1_047_044,
        "sha256:60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
    ),
    RemoteFile(
        f"{_SENTEVAL}/msr_paraphrase_test.txt",
        "glue/MRPC/msr_paraphrase_test.txt",
        441_275,
        "sha256:a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
    ),
    RemoteFile(
        f"{_FACEBOOK}/glue/data/mrpc_dev_ids.tsv",
        "glue/MRPC/dev_ids.tsv",
        6_222,
        "sha256:971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
    ),
)


def _glue() -> dict[str, tuple[RemoteFile, ...]]:
    """Return the files of each task."""
    found: dict[str, tuple[RemoteFile, ...]] = {}
    for task, folder in GLUE_FOLDERS.items():
        if task == "mrpc":
            found[task] = _MRPC
            continue
        archive, size, digits = _GLUE_ARCHIVES[task]
        file = RemoteFile(f"{_FACEBOOK}/glue/data/{archive}", f"glue/{folder}", size, f"sha256:{digits}", f"{folder}/*.tsv")
        found[task] = (file,)
    return found


_SQUAD_PAGE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"


def _squad(version: str, train: tuple[int, str], dev: tuple[int, str]) -> tuple[RemoteFile, ...]:
    """Return the files of a version; each has a folder of its own, since the questions of 2.0 contain those of 1.1."""
    folder = "squad" if version == "1.1" else f"squad-v{version}"
    return tuple(
        RemoteFile(f"{_SQUAD_PAGE}/{part}-v{version}.json", f"{folder}/{part}-v{version}.json", size, f"sha256:{digits}")
        for part, (size, digits) in (("train", train), ("dev", dev))
    )


_AMAZON = {
    "2014": """Amazon_Instant_Video Apps_for_Android Automotive Baby Beauty Books CDs_and_Vinyl Cell_Phones_and_Accessories
        Clothing_Shoes_and_Jewelry Digital_Music Electronics Grocery_and_Gourmet_Food Health_and_Personal_Care Home_and_Kitchen Kindle_Store
        Movies_and_TV Musical_Instruments Office_Products Patio_Lawn_and_Garden Pet_Supplies Sports_and_Outdoors Tools_and_Home_Improvement
        Toys_and_Games Video_Games""",
    "2018": """AMAZON_FASHION All_Beauty Appliances Arts_Crafts_and_Sewing Automotive Books CDs_and_Vinyl Cell_Phones_and_Accessories
        Clothing_Shoes_and_Jewelry Digital_Music Electronics Gift_Cards Grocery_and_Gourmet_Food Home_and_Kitchen Industrial_and_Scientific
        Kindle_Store Luxury_Beauty Magazine_Subscriptions Movies_and_TV Musical_Instruments Office_Products Patio_Lawn_and_Garden Pet_Supplies
        Prime_Pantry Software Sports_and_Outdoors Tools_and_Home_Improvement Toys_and_Games Video_Games""",
}
_AMAZON_PAGES = {
    "2014": "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_{}_5.json.gz",
    "2018": "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_v2/categoryFilesSmall/{}_5.json.gz",
}


def _amazon() -> dict[str, tuple[RemoteFile, ...]]:
    """Return the files of each year and category, `2014/Digital_Music`; neither sizes nor checksums are published."""
    found: dict[str, tuple[RemoteFile, ...]] = {}
    for year, categories in _AMAZON.items():
        for category in categories.split():
            address = _AMAZON_PAGES[year].format(category)
            found[f"{year}/{category}"] = (RemoteFile(address, f"amazon-reviews/{address.rpartition('/')[2]}"),)
    return found


BOOKS = {
    11: "Alice's Adventures in Wonderland", 74: "The Adventures of Tom Sawyer", 76: "Adventures of Huckleberry Finn", 84: "Frankenstein",
    98: "A Tale of Two Cities", 120: "Treasure Island", 174: "The Picture of Dorian Gray", 345: "Dracula", 768: "Wuthering Heights",
    1260: "Jane Eyre", 1342: "Pride and Prejudice", 1400: "Great Expectations", 1661: "The Adventures of Sherlock Holmes",
    2600: "War and Peace", 2701: "Moby Dick",
}  # fmt: skip
"""The short list of books of Project Gutenberg, by number."""


def book(number: int) -> RemoteFile:
    """Return the plain text of a book of Project Gutenberg, from the mirror that it keeps for programs; its texts are corrected now and then."""
    return RemoteFile(f"https://gutenberg.pglaf.org/cache/epub/{number}/pg{number}.txt", f"books/pg{number}.txt")


_CC_BY_SA = "CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/)"
_ROWS = (
    Dataset(
        "wikipedia",
        "all articles of a language, with their markup, as one dump of many bzip2 streams and its index",
        f"{_CC_BY_SA} and GFDL; see https://dumps.wikimedia.org/legal.html",
        "Wikimedia Foundation, Wikimedia Downloads, https://dumps.wikimedia.org",
    ),
    Dataset(
        "squad",
        "questions about paragraphs of Wikipedia, 1.1 or 2.0",
        _CC_BY_SA,
        "Rajpurkar et al. 2016, SQuAD: 100,000+ Questions for Machine Comprehension of Text, arXiv 1606.05250; of 2.0: Rajpurkar, Jia and Liang 2018, "
        "Know What You Don't Know: Unanswerable Questions for SQuAD, arXiv 1806.03822",
        {
            "1.1": _squad(
                "1.1",
                (30_288_272, "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955"),
                (4_854_279, "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
            ),
            "2.0": _squad(
                "2.0",
                (42_123_633, "68dcfbb971bd3e96d5b46c7177b16c1a4e7d4bdef19fb204502738552dede002"),
                (4_370_528, "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
            ),
        },
        ("1.1",),
    ),
    Dataset(
        "glue",
        "nine tasks of single sentences and pairs",
        "each task has its own, most are for research; see https://gluebenchmark.com/faq",
        "Wang et al. 2019, GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding, arXiv 1804.07461; "
        "each task asks to be cited too, see https://gluebenchmark.com/tasks",
        _glue(),
        tuple(GLUE_FOLDERS),
    ),
    Dataset(
        "imdb",
        "50,000 labeled film reviews and as many unlabeled",
        "none stated; published for research",
        "Maas et al. 2011, Learning Word Vectors for Sentiment Analysis, ACL, https://aclanthology.org/P11-1015",
        {
            "": (
                RemoteFile(
                    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                    "imdb/aclImdb_v1.tar.gz",
                    84_125_825,
                    "sha256:c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
                ),
            )
        },
        ("",),
    ),
    Dataset(
        "amazon",
        "product reviews of a category, of users and products that have five (5-core), 2014 or 2018",
        "none stated; published for research",
        "2014: He and McAuley 2016, Ups and Downs: Modeling the Visual Evolution of Fashion Trends with One-Class Collaborative Filtering, arXiv 1602.01585; "
        "2018: Ni, Li and McAuley 2019, Justifying Recommendations using Distantly-Labeled Reviews and Fine-Grained Aspects, EMNLP, https://aclanthology.org/D19-1018",
        _amazon(),
    ),
    Dataset(
        "gutenberg",
        "books of Project Gutenberg, plain text",
        "public domain in the United States, other countries may differ; the name is a trademark, see https://www.gutenberg.org/policy/license.html",
        "Project Gutenberg, https://www.gutenberg.org",
        {str(number): (book(number),) for number in BOOKS},
        tuple(map(str, BOOKS)),
        pause=2.0,
    ),
    Dataset(
        "blimp",
        "67,000 minimal pairs of English grammar, for scoring only",
        "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/)",
        "Warstadt et al. 2020, BLiMP: The Benchmark of Linguistic Minimal Pairs for English, arXiv 1912.00582",
        {
            "": (
                RemoteFile(
                    "https://raw.githubusercontent.com/alexwarstadt/blimp/3e56b06fcabca9b30822fc66435fca6b1aa40bb1/BLiMP.zip",
                    "blimp/data",
                    2_354_164,
                    "sha256:172a1a714d72e72a89e8384dd531483f3d0f8a9aee3d33dccaf7992d8cecbb73",
                    "data/*.jsonl",
                ),
            )
        },
        ("",),
    ),
)
DATASETS = {row.name: row for row in _ROWS}
"""The table."""
