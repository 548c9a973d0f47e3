"""Command lines in which a flag takes another one's place, since each is given once."""

from rooflax.cli.main import parser_of


def replaced(verb, base, flags):
    """The arguments of `base` without the flags that `flags` gives too, then those."""
    actions = parser_of(verb)._option_string_actions
    given = {actions[flag] for flag in map(str, flags) if flag in actions}
    kept, is_dropped = [], False
    for argument in base:
        action = actions.get(str(argument))
        if action is not None:
            is_dropped = action in given
        if not is_dropped:
            kept.append(argument)
        is_dropped = is_dropped and (action is None or action.nargs != 0)
    return [*kept, *flags]
