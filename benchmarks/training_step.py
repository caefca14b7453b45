"""What communication adds to a training step: DistributedOptimizer beside DDP (Gloo), with Fusewire's bars.

python benchmarks/training_step.py [-n 4] [--quick] [--json out.json] [--plot out.png]
"""

import sys

from fusewire.bench import main

if __name__ == "__main__":
    sys.exit(main(["--only", "training", "--bars", *sys.argv[1:]]))
