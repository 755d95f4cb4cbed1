"""`python -m tests.mismatch --json FILE`: fourteen causes injected into a real server or trainer, and a hundred clean
runs; prints what was named. `injected`, `named` and `false_alarms` are in the file."""

import argparse
import json
import os
import tempfile
from pathlib import Path

from tests.mismatch.injections import FOURTEEN, MORE
from tests.mismatch.study import study


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.mismatch", description=__doc__)
    parser.add_argument("--clean", type=int, default=100, help="clean runs")
    parser.add_argument("--only", nargs="+", choices=[*FOURTEEN, *MORE], help="some of the causes")
    parser.add_argument("--url", help="a server that runs already, of the same model, instead of launching one")
    parser.add_argument("--dtype", default="float32", help="of the weights of both sides")
    parser.add_argument("--json", type=Path, help="write what was found there")
    options = parser.parse_args()
    environment = os.environ.get("MPPO_SGLANG_ENV", "sglang-env")
    server = f"rollout.sglang.urls=[{options.url}]" if options.url else f"rollout.sglang.environment={environment}"
    with tempfile.TemporaryDirectory() as folder:
        given = [server, f"model.dtype={options.dtype}"]
        found = study(Path(folder), given, options.clean, lambda text: print(text, flush=True), options.only)
    print(
        f"{found['named']} of {found['injected']} causes named, {found['false_alarms']} false alarms in"
        f" {found['clean_runs']} clean runs (largest difference {found['largest_clean_difference']:.1e} nats over"
        f" {found['clean_tokens']} tokens), {found['seconds']:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
