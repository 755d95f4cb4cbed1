from dataclasses import dataclass

import pytest

from mppo.algorithm.kl import k2
from mppo.errors import ConfigError
from mppo.registry import Plugin, Registry, Traits

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class ColourTraits(Traits):
    warm: bool = False


COLOURS = Registry("colour", traits=ColourTraits)


@dataclass(frozen=True)
class Shade:
    depth: float = 0.5
    """How dark."""
    steps: int | None = None
    """How many."""

    def __post_init__(self):
        if self.depth > 1:
            raise ConfigError(f"colour.depth is {self.depth}; it must be at most 1")


@COLOURS.register("crimson", config=Shade, warm=True)
def crimson():
    pass


def teal():
    pass


teal.config = Shade


def tint(base, config):
    return base, config


def registry_with(name, fn):
    registry = Registry("colour")
    registry.register(name)(fn)
    return registry


def test_what_is_registered_is_found_with_its_traits():
    plugin = COLOURS.get("crimson")
    assert (plugin.fn, plugin.config, plugin.traits) == (crimson, Shade, ColourTraits(warm=True))


def test_a_name_cannot_be_taken_twice():
    registry = registry_with("crimson", crimson)
    with pytest.raises(ConfigError, match="colour 'crimson' is registered already.*override=True"):
        registry.register("crimson")(teal)
    assert registry.get("crimson").fn is crimson


def test_a_name_can_be_replaced_on_purpose():
    registry = registry_with("crimson", crimson)
    registry.register("crimson", override=True)(teal)
    assert registry.get("crimson").fn is teal


def test_a_trait_that_the_kind_does_not_have_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="colour 'teal': there is no trait 'warn'; did you mean 'warm'"):
        COLOURS.register("teal", warn=True)


def test_names_are_sorted():
    registry = registry_with("teal", teal)
    registry.register("amber")(crimson)
    assert registry.names() == ["amber", "teal"]


def test_an_unknown_name_is_named_with_the_known_and_the_nearest():
    with pytest.raises(ConfigError, match="unknown colour 'crimsom'; known: crimson;.*did you mean 'crimson'"):
        COLOURS.get("crimsom")


def test_an_import_path_of_something_registered_is_the_registered_plugin():
    assert registry_with("half square", k2).get("mppo.algorithm.kl:k2").name == "half square"


def test_an_import_path_needs_no_registration_and_brings_its_own_knobs():
    plugin = COLOURS.get(f"{__name__}:teal")
    assert (plugin.fn, plugin.config, plugin.traits) == (teal, Shade, ColourTraits(warm=False))


@pytest.mark.parametrize(
    "path", ["no_such_package:loss", "mppo.algorithm.kl:no_such_loss", "mppo.algorithm.kl:", ":loss", ".kl:loss"]
)
def test_an_import_path_that_leads_nowhere_is_named(path):
    with pytest.raises(ConfigError, match=f"colour '{path}' cannot be imported"):
        COLOURS.get(path)


def test_an_import_path_to_something_that_cannot_be_called_is_named():
    with pytest.raises(ConfigError, match="'mppo.algorithm.kl:LOG_RATIO_LIMIT'"):
        COLOURS.get("mppo.algorithm.kl:LOG_RATIO_LIMIT")


def test_knobs_are_typed_and_have_defaults():
    crimson = COLOURS.get("crimson")
    assert crimson.configure({}, "paint") == Shade(0.5, None)
    assert crimson.configure({"depth": 1, "steps": "3"}, "paint") == Shade(1.0, 3)


def test_a_plugin_is_called_with_its_knobs_as_config():
    assert Plugin("tint", tint, Shade, Traits()).bind({"depth": 0.2}, "paint")("red") == ("red", Shade(0.2))


def test_a_plugin_without_knobs_is_called_as_it_is():
    assert registry_with("teal", teal).get("teal").bind({}, "paint") is teal


def test_an_unknown_knob_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"paint\.dept: 'crimson' does not read.*depth, steps.*did you mean 'depth'"):
        COLOURS.get("crimson").configure({"dept": 0.2}, "paint")


def test_a_knob_for_a_plugin_without_any_is_named():
    with pytest.raises(ConfigError, match=r"paint\.depth: 'teal' does not read this knob \(it has none\)"):
        registry_with("teal", teal).get("teal").configure({"depth": 0.2}, "paint")


@pytest.mark.parametrize("knobs", [{"depth": "deep"}, {"depth": None}, {"depth": [1.0]}])
def test_a_knob_of_the_wrong_type_is_named(knobs):
    with pytest.raises(ConfigError, match=r"paint\.depth"):
        COLOURS.get("crimson").configure(knobs, "paint")


def test_a_knob_out_of_range_is_refused_by_its_own_dataclass():
    with pytest.raises(ConfigError, match=r"colour\.depth is 2\.0"):
        COLOURS.get("crimson").configure({"depth": 2}, "paint")


def test_an_installed_package_registers_through_its_entry_point(tmp_path, monkeypatch):
    """Its module is imported when a name is not known otherwise."""
    (tmp_path / "paint_table.py").write_text("from mppo.registry import Registry\n\nPAINTS = Registry('paint')\n")
    (tmp_path / "paint_plugin.py").write_text(
        "from paint_table import PAINTS\n\n\n@PAINTS.register('late')\ndef late():\n    pass\n"
    )
    metadata = tmp_path / "paint_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paint-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mppo.plugins]\npaint = paint_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)

    from paint_table import PAINTS

    assert PAINTS.names() == []
    assert PAINTS.get("late").name == "late"
