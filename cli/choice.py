"""An option that takes one of some names."""

from typing import Any

import click

from longctx_patch.rules.names import did_you_mean


class Choice(click.Choice[str]):
    """One of some names; another one is refused with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + did_you_mean(value, self.choices), param, ctx)
