"""``rung config``: show a preset with overrides, resolved, its parameter count, and which rule updates what."""

from __future__ import annotations

from collections.abc import Sequence

from rung import config as settings
from rung.cli.flags import Parser, print_result, say
from rung.cli.training_flags import add_training_flags, base_of, changes_of


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("config", "Show a config, resolved, as TOML, and the number of parameters of its model.")
    add_training_flags(parser)
    parsed = parser.parse_args(arguments)
    config, notes = settings.adapt(base_of(parsed) or settings.Config(), changes_of(parsed), "flag")
    for note in notes:
        say(note)
    config = settings.resolve(config)

    from rung.report.words import plural
    from rung.run.parameters import count_parameters, optimizer_groups

    parameters = count_parameters(config, say)
    groups = "".join(
        f"#   {row['rule']}: {plural(row['weights'], 'weight')}, {plural(row['parameters'], 'parameter')}, "
        f"peak learning rate {row['learning_rate']:g}, weight decay {row['weight_decay']:g}\n"
        for row in optimizer_groups(config)
    )
    text = f"# {parameters:,} parameters\n{groups}{settings.to_toml(config)}"
    print_result({"parameters": parameters, "config": settings.to_dict(config)}, parsed.json, text.rstrip())
    return 0
