"""An option that takes one of several names."""

from typing import Any

import click

from longctx_patch.rules.names import did_you_mean


class Choice(click.Choice[str]):
    """One of several names; any other name is refused, with the nearest of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + did_you_mean(value, self.choices), param, ctx)
