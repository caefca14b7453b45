"""CPU that an initialised rank uses over five seconds in which nothing is asked of it.

python benchmarks/idle.py [-n 4] [--json out.json]
"""

import sys

from fusewire.bench import main

if __name__ == "__main__":
    sys.exit(main(["--only", "idle", "--bars", *sys.argv[1:]]))
