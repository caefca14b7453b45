"""Allreduce of one tensor (4 B to 256 MB) and of tensor lists, beside Gloo, MPI and memcpy, with Fusewire's bars.

python benchmarks/allreduce.py [-n 4] [--quick] [--json out.json] [--plot out.png]
"""

import sys

from fusewire.bench import main

if __name__ == "__main__":
    sys.exit(main(["--only", "allreduce,list", "--bars", *sys.argv[1:]]))
