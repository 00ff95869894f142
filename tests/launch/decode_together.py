"""One of several processes that decode through the library with FLy.

It writes to a file what follows each prompt, and after how many rounds that is done.
"""

import json
import sys
from pathlib import Path

from fly_jax import Fly, generate, load_pair
from fly_jax.sharding.processes import detect_process, initialize

# Rows of one batch differ in length and end at different rounds; the last batch is not full.
PROMPTS = ["Ada has 3 apples in a box", "Boris", "Vera's 7 apples", "Boris buys 12", "Ada"]
MAX_NEW_TOKENS = 12


def main() -> None:
    given = dict(one.removeprefix("--").split("=", 1) for one in sys.argv[1:])
    place = (int(given[name]) for name in ("num_processes", "process_id"))
    process = detect_process(given["coordinator_address"], *place)
    initialize(process, timeout=240)
    pair = load_pair(given["target"], given["draft"], mesh=given["mesh"], dtype="float32")
    sizes = {"num_speculative_tokens": 4, "max_new_tokens": MAX_NEW_TOKENS, "batch_size": 3}
    found = generate(pair, PROMPTS, rule=Fly(window_size=2), **sizes)
    path = Path(given["folder"], f"results_{process.process_id}.json")
    path.write_text(json.dumps([[row.token_ids, row.num_rounds] for row in found]))


if __name__ == "__main__":
    main()
