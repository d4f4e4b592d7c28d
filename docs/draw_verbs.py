"""Draws docs/verbs/*.svg: what each verb of the command line prints, in the colours of
a terminal.

    python docs/draw_verbs.py            # writes all of them; the demo takes a minute
    python docs/draw_verbs.py lint fit   # writes these

The commands run with the model and the checkpoint of docs/cli.md. Needs the extras
`cli` and `demo`.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from safetensors.numpy import save_file

from shardfx.__main__ import main as shardfx
from shardfx._cli._screen import coloured


DOCS = Path(__file__).parent
FOLDER = DOCS / "verbs"
# The verb, its command, and how many lines of it are shown. `report` prints nothing:
# its picture is the page.
COMMANDS = {
    "plan": (
        "plan llama3-405b --mesh data=4,fsdp=64,tensor=8 --rules fsdp_tp --width 92",
        24,
    ),
    "explain": (
        (
            "explain llama3-405b 'model/layers/{0..125}/self_attn/k_proj/weight' "
            "--mesh fsdp=8,tensor=16 --rules tp"
        ),
        24,
    ),
    "lint": (
        (
            "lint my_model:make --mesh fsdp=4,tensor=3 "
            "--rules 'donw->tensor, down->fsdp.tensor, up->fsdp'"
        ),
        24,
    ),
    "diff": (
        (
            "diff llama3-8b --mesh fsdp=8 --rules fsdp "
            "--to-mesh fsdp=4,tensor=2 --to-rules fsdp_tp"
        ),
        24,
    ),
    "fit": (
        (
            "fit llama3-70b --mesh fsdp=64,tensor=4 --rules fsdp_tp "
            "--optimizer optax:adamw --chip v5e"
        ),
        24,
    ),
    "traffic": (
        "traffic my_model:train_step --mesh data=16,fsdp=64,tensor=8 --how estimate",
        24,
    ),
    "why": ("why my_model:train_step --mesh data=2,fsdp=4,tensor=2", 24),
    "search": (
        "search my_model:plain_step --target tpu:v5e:2x4 --keep 1",
        24,
    ),
    "convert": ("convert model-dir stacked --map my_model:STACKED", 24),
    "clean": ("clean checkpoints", 24),
    "models": ("models qwen3", 24),
    "chips": ("chips v5e v5p v7x h100 b200", 24),
    "demo": ("demo --cpu-devices 8 --steps 20 --batch 8", 40),
}
# Of a line, in characters: beyond it a picture gets too small to read.
WIDEST = 132
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})"
  clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A folder with the model and the checkpoint of docs/cli.md, in which commands run."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        page = (DOCS / "cli.md").read_text()
        sources = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        Path("my_model.py").write_text("".join(sources))
        shapes = {"up": (8, 4), "down": (4, 8)}
        arrays = {
            f"layer_{layer}.{name}": np.full(shape, layer, np.float32)
            for layer in range(3)
            for name, shape in shapes.items()
        }
        Path("model-dir").mkdir()
        save_file(arrays, "model-dir/model.safetensors")
        killed = Path("checkpoints/.step-100.partial-41d7f2a90c3b5e68")
        killed.mkdir(parents=True)
        (killed / "model.safetensors").write_bytes(b"0" * 8192)
        for path in (killed / "model.safetensors", killed):
            os.utime(path, (time.time() - 93600, time.time() - 93600))
        sys.path.insert(0, name)
        sys.modules.pop("my_model", None)
        try:
            yield Path(name)
        finally:
            sys.path.remove(name)
            sys.modules.pop("my_model", None)


def printed(verb: str) -> str:
    """What a verb prints, as it does where there is no terminal."""
    words = shlex.split(COMMANDS[verb][0])
    if verb == "demo":  # it sets up JAX's devices, and so needs a process of its own
        command = [sys.executable, "-m", "shardfx", *words]
        root = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=root
        )
        return done.stdout
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = shardfx(words)
    if code not in (0, 1):
        raise SystemExit(f"`shardfx {' '.join(words)}` ended with {code}")
    return out.getvalue()


def shown(verb: str) -> list[str]:
    """The lines of a picture: those in the middle are left out where there are too
    many.
    """
    most = COMMANDS[verb][1]
    lines = [line.rstrip() for line in printed(verb).rstrip().splitlines()]
    if len(lines) > most:
        last = most // 3
        lines = [*lines[: most - last - 1], "...", *lines[-last:]]
    return [line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…" for line in lines]


def drawn(verb: str) -> str:
    """The picture of a verb."""
    command, lines = COMMANDS[verb][0], shown(verb)
    prompt = f"$ shardfx {command}"
    console = Console(
        record=True,
        width=max(92, *map(len, lines)),
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(Text(prompt, "bold"), "")
    console.print(coloured("\n".join(lines)), highlight=False)
    picture = console.export_svg(
        title=f"shardfx {verb}",
        theme=SVG_EXPORT_THEME,
        code_format=_FORMAT,
        unique_id=verb,
    )
    return "\n".join(line.rstrip() for line in picture.splitlines() if line.strip())


def text_of(picture: str) -> str:
    """All words of a picture, without how they are drawn."""
    return " ".join(
        " ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture))
        .replace("&#160;", " ")
        .split()
    )


def main(verbs: list[str]) -> int:
    """Writes pictures."""
    FOLDER.mkdir(exist_ok=True)
    with place():
        for verb in verbs or COMMANDS:
            (FOLDER / f"{verb}.svg").write_text(drawn(verb) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
