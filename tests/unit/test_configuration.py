import tomllib
from pathlib import Path

from gateway import codes, configuration
from gateway.sources import load

DOCS = Path(__file__).parents[2] / "docs"


def test_the_configuration_reference_is_current() -> None:
    # To renew it: tidegate config --docs > docs/configuration.md
    assert (DOCS / "configuration.md").read_text() == configuration.markdown()


def test_the_code_table_is_current() -> None:
    # To renew it: python -m gateway.codes > docs/codes.md
    assert (DOCS / "codes.md").read_text() == codes.markdown()


def test_the_listing_is_a_settings_file_without_secrets(tmp_path: Path) -> None:
    settings = load(
        environ={
            "TIDEGATE_POSTGRES_DSN": "postgresql://app:hunter2@db/shop",
            "TIDEGATE_ALLOWED_ORIGINS": "https://a.example.com",
            "TIDEGATE_NAMESPACES": '{"orders": {"publish": "anyone"}, "*": {}}',
        }
    )
    listing = configuration.listing(settings)
    assert "hunter2" not in listing
    assert "# postgres_dsn is set" in listing
    file = tmp_path / "tidegate.toml"
    file.write_text(listing)
    assert tomllib.loads(listing)["port"] == 8000
    again = load(file, environ={"TIDEGATE_POSTGRES_DSN": "postgresql://app:hunter2@db/shop"})
    assert again == settings
