"""`python -m tests.arrival_order --json FILE`: 50 orders of arrival in each layout; prints `differing_bits`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tests.arrival_order.study import LAYOUTS, study


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.arrival_order", description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--arrivals", type=int, default=50, help="orders of arrival, from 1, 2 and 4 producing ranks")
    parser.add_argument("--json", type=Path, help="write what was found there")
    options = parser.parse_args()
    found = study(dict.fromkeys(options.layouts, options.arrivals), lambda text: print(text, flush=True))
    for name, layout in found.items():
        print(
            f"{name}: {layout.differing_bits} differing bits over {layout.arrivals} arrivals;"
            f" {layout.error_to_one_process:.1e} from one process, where the update changes {layout.change:.1e}"
        )
    if options.json:
        total = sum(layout.differing_bits for layout in found.values())
        layouts = {name: asdict(layout) for name, layout in found.items()}
        options.json.write_text(json.dumps({"differing_bits": total, "layouts": layouts}, indent=2))


if __name__ == "__main__":
    main()
