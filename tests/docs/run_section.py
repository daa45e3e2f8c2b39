"""Executes one section's examples in a process of its own: ``python run_section.py PAGE``.

Takes the examples from stdin as JSON, prints ``[[printed, error], …]`` as JSON. The Python examples
share one namespace. The server comes from libpq's environment variables, as in the examples
themselves. Stops at the first unexpected error.
"""

import contextlib
import io
import json
import subprocess
import sys
import traceback
from typing import Any

import psycopg


def main() -> None:
    page = sys.argv[1]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    results = []
    for example in json.load(sys.stdin):
        printed, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(printed):
                match example["language"]:
                    case "sql":
                        run_sql(example["code"])
                    case "python":
                        # Line numbers of tracebacks are the page's.
                        code = "\n" * (example["line"] - 1) + example["code"]
                        exec(compile(code, page, "exec"), namespace)
                    case "javascript":
                        run_javascript(example["code"])
        except Exception:
            error = traceback.format_exc()
        results.append((printed.getvalue(), error))
        if error:
            break
    json.dump(results, sys.stdout)


def run_sql(script: str) -> None:
    """Runs the statements as psql does; prints the last rows, or the error."""
    with psycopg.connect(autocommit=True) as conn:
        cursor = psycopg.ClientCursor(conn)
        try:
            cursor.execute(script.encode())
        except psycopg.Error as error:
            print(f"ERROR:  {error.diag.message_primary}")
            return
        result = cursor.pgresult
        while cursor.nextset():
            if cursor.description is not None:
                result = cursor.pgresult
        if result is None or not result.nfields:
            return
        # The server's own text, as psql prints it.
        columns = range(result.nfields)
        header = [(result.fname(column) or b"").decode() for column in columns]
        rows = [header] + [
            [(result.get_value(row, column) or b"").decode() for column in columns]
            for row in range(result.ntuples)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        for cells in rows:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            print(" | ".join(padded).rstrip())


def run_javascript(code: str) -> None:
    command = ["node", "--input-type=module", "--eval", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(done.stderr)


if __name__ == "__main__":
    main()
