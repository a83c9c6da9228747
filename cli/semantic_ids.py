"""`evenrank semantic-ids`: codes of items from their vectors, and what these codes are worth."""

import typer

from evenrank.cli import console, options, settings_options
from evenrank.codebooks.config import SemanticIdsConfig

OPTIONS = settings_options.options_of(SemanticIdsConfig)


@settings_options.command_of(OPTIONS)
def semantic_ids_command(ctx: typer.Context, as_json: options.Json = False) -> None:
    """Make semantic ids: quantize the item vectors of a dataset into a few codes per item.

    The folder that it writes is for LoaderConfig(codes=FOLDER). Codes are of residual k-means, by faiss (pip install
    'evenrank[sid]') or on a GPU. Examples:

    \b
        evenrank semantic-ids out/day1 --levels 3 --codes 256
        evenrank semantic-ids out/day1 --method balanced --collisions nearest
        evenrank semantic-ids out/day2 --append out/day1-semantic-ids
    """
    config = settings_options.chosen(SemanticIdsConfig, ctx, OPTIONS)
    folder = config.folder

    from evenrank.codebooks import make_semantic_ids

    with console.stages() as on_stage:
        bundle, report = make_semantic_ids(config, on_stage=on_stage)
    table = console.new_table("level", "codes", "in use", "dead", "entropy", left=())
    for level, size in enumerate(bundle.codebook_sizes):
        used, dead, bits = (report[name][level] for name in ("coverage", "dead", "entropy_bits"))
        table.add_row(str(level + 1), f"{size:,}", f"{used:.1%}", f"{dead:,}", f"{bits:.2f} bits")
    console.print_result(table, **report)
    console.print_result(f"items: {report['items']:,} with codes, {report['without_code']:,} without a vector")
    told_apart = {"level": "numbered by the last level", "nearest": "moved to a free tuple"}[bundle.collisions]
    console.print_result(
        f"collisions: {report['collisions']:,} of {report['coded_now']:,} new items, {told_apart}; at most "
        f"{report['largest_group']:,} items with the same codes"
    )
    console.print_result(f"reconstruction error: {report['reconstruction_error']:.1%} of the variance")
    console.print_result(f"neighbours kept: {report['neighbours_kept']:.1%} of the 10 nearest")
    version = bundle.codes.versions[-1]
    console.print_result(
        f"version {len(bundle.codes.versions)} ({version.sha256[:12]}): {folder}", folder=folder, version=version.sha256
    )
