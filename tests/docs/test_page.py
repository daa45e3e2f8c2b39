"""The runner itself: it finds the examples, and it notices when one is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.page import Example, sections, unmarked
from tests.docs.test_pages import check

PAGE = """\
# Title

```sql run
CREATE TABLE t (n int);
```

## First

Text, and a list:

- an item

  ```python run
  ## no heading
  print("a")
  ```

  ```text output
  a
  ```

## No examples

```sh
make demo
```

## Last

```sql
SELECT 1;
```

```sql run
SELECT 2;
```
"""


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_sections(tmp_path: Path) -> None:
    page = page_of(tmp_path, PAGE)
    first, last = sections(page)
    opening = Example("sql", "CREATE TABLE t (n int);\n", 4, None)
    own = Example("python", '## no heading\nprint("a")\n', 14, "a\n")
    assert (first.title, first.examples) == ("First", (opening, own))
    assert (last.title, last.examples) == (
        "Last",
        (opening, Example("sql", "SELECT 2;\n", 35, None)),
    )
    assert unmarked(page) == [30]


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ("```sql run\nSELECT 1 AS n;\n```\n```text output\nn\n-\n2\n```", "page.md:2"),
        ("```sql run\nSELECT 1/0;\n```", "ERROR:  division by zero"),
        ("```python run\nprint(1)\n```\n```text output\n2\n```", "page.md:2"),
        ("```python run\n\nassert False\n```", r'page.md", line 3'),
        ("```python run\nx = 1\n```\n```python run\nimport nothing_of_this_name\n```", "page.md:5"),
        ("```javascript run\nthrow new Error('oh');\n```", "Error: oh"),
    ],
)
def test_a_wrong_example_fails(
    tmp_path: Path, migrated: str, require: Callable[[str], str], example: str, text: str
) -> None:
    page = page_of(tmp_path, example + "\n")
    (section,) = sections(page)
    with pytest.raises(AssertionError, match=text):
        check(page, section, migrated, require)
