"""What the run folder says of the exchange of recurrent layers."""

from longctx_patch import LongContextConfig
from longctx_patch.cli.recurrent_row import recurrent_rows
from tests.hf.tiny import featured_model


def test_the_way_is_named_with_its_reason() -> None:
    config = featured_model("bamba").config  # of eight heads
    by_rule = recurrent_rows(config, LongContextConfig(ulysses_degree=3), 4096)
    assert by_rule == [
        (
            "recurrent",
            "exchange states, along 3 ranks",
            "8 heads with a state are no multiple of ulysses_degree=3",
        )
    ]
    ((what, value, why),) = recurrent_rows(config, LongContextConfig(ulysses_degree=2), 4096)
    assert (what, value.split(",")[0]) in {
        ("recurrent", "exchange states"),
        ("recurrent", "exchange heads"),
    }
    assert why.startswith("a layer predicted, from estimated rates: states ")


def test_nothing_is_said_where_nothing_is_decided() -> None:
    assert recurrent_rows(featured_model("bamba").config, LongContextConfig(), 4096) == []
    shared = LongContextConfig(ulysses_degree=2)
    assert recurrent_rows(featured_model("lfm2").config, shared, 4096) == []
    assert recurrent_rows(featured_model("llama").config, shared, 4096) == []
