"""The commands that use a trained encoder as it is: embed, serve."""

from __future__ import annotations

import argparse

from overnight.cli.recipe_commands import Add
from overnight.cli.task_keys import add_source, check_keys, open_encoder
from overnight.display import plural
from overnight.errors import ConfigError, DataError

_SOURCE = (
    "run folder, a fine-tuned task in it (RUN/finetune/TASK), a Hugging Face folder, or another program's checkpoint (docs/checkpoints.md)"
)


def _add_embed(add: Add) -> None:
    command = add("embed", _embed, "turn texts into vectors: hidden states of an encoder, as JSON lines or .npy", keys=True)
    text = "lines of text or JSON, .jsonl, or a table (.csv, .tsv, .parquet) with a column `text`; - is standard input; without an `id`, the id of a table row is its number, from 0, and that of a line its number, from 1"
    command.add_argument("files", nargs="+", metavar="FILE", help=text)
    add_source(command, what=_SOURCE)
    command.add_argument(
        "--to", metavar="FILE", help="file to write: .npy (float32, one row per text) or .jsonl; default: print JSON lines"
    )
    command.add_argument(
        "--pooling", choices=("mean", "first"), default="mean", help="mean of all tokens, or the first token, [CLS]; default mean"
    )
    text = "layer whose output to use: -1 the last, 0 the embedding table; default -1"
    command.add_argument("--layer", type=int, default=-1, metavar="N", help=text)
    command.add_argument("--normalize", action="store_true", help="scale the vectors to length one, so that their dot products are cosines")


def _embed(options: argparse.Namespace, overrides: list[str]) -> None:
    check_keys(options.command, overrides)
    from overnight.inference.embed_files import check_output, embed_files, write_embeddings
    from overnight.inference.embedding import check_embedding

    to = check_output(options.to)
    model = open_encoder(options, overrides)
    check_embedding(model.trained, options.pooling, options.layer)
    found = embed_files(model, options.files, options.pooling, options.layer, options.normalize)
    count, broken = write_embeddings(found, to, model.embedding_size, len(options.files) > 1)
    if to:
        print(f"written: {to} ({plural(count, 'text')}, {plural(model.embedding_size, 'number')} each, float32)")
    if broken:
        raise DataError(f"{plural(broken, 'line')} of {count:,} could not be embedded; each says why in its place")


def _add_serve(add: Add) -> None:
    command = add("serve", _serve, "answer and embed texts over HTTP, for this machine only unless --host says otherwise", keys=True)
    add_source(command, what=_SOURCE)
    command.add_argument(
        "--host", default="127.0.0.1", metavar="HOST", help="address to listen on; default 127.0.0.1, which only this machine can reach"
    )
    command.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on; default 8000; 0 is any free port")
    command.add_argument("--max-texts", type=int, default=256, metavar="N", help="maximum texts per request; default 256")
    command.add_argument("--max-bytes", type=int, default=1 << 20, metavar="N", help="maximum bytes per request; default 1048576")
    command.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="time within which a request must arrive; default 10"
    )


def _serve(options: argparse.Namespace, overrides: list[str]) -> None:
    check_keys(options.command, overrides)
    for name, value in (("max-texts", options.max_texts), ("max-bytes", options.max_bytes), ("timeout", options.timeout)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{name} = {value}: must be more than 0")
    from overnight.inference.server import Limits, serve

    limits = Limits(body_bytes=options.max_bytes, texts=options.max_texts, body_seconds=options.timeout)
    serve(open_encoder(options, overrides), options.host, options.port, limits)


COMMANDS = (_add_embed, _add_serve)
