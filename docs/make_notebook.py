"""Run the cells of examples/long_context.ipynb and write what they show: `make notebook`.

    python -m docs.make_notebook [OUT.ipynb]     # without OUT the notebook itself is written

The cells run in order in this process, as in a kernel: what they print is kept, and the last value
of each. Jupyter is not needed. An error ends the run, and nothing is written.
"""

import ast
import json
import sys
from base64 import b64encode
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "long_context.ipynb"

Json = dict[str, Any]


def main(out: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    namespace: Json = {"__name__": "__main__"}
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for count, cell in enumerate(code, start=1):
        cell["execution_count"] = count
        cell["outputs"] = run_cell("".join(cell["source"]), namespace, count)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    out.write_text(f"{text}\n", encoding="utf-8")


def run_cell(source: str, namespace: Json, count: int) -> list[Json]:
    """Run a cell in the namespace; return its outputs, as nbformat 4 has them."""
    tree = ast.parse(source)
    *_, last = tree.body
    value = None
    with redirect_stdout(StringIO()) as printed:
        if isinstance(last, ast.Expr):
            tree.body.remove(last)
        exec(compile(tree, f"cell {count}", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), namespace)
    outputs: list[Json] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if value is not None:
        result = {"execution_count": count, "metadata": {}, "output_type": "execute_result"}
        outputs.append({"data": shown(value), **result})
    return outputs


def shown(value: Any) -> Json:
    """A cell's last value in every form that it has."""
    data: Json = {"text/plain": lines(repr(value))}
    if hasattr(value, "_repr_png_"):
        data = {"image/png": b64encode(value._repr_png_()).decode(), **data}
    return data


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK)
