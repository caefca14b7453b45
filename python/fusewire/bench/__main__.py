"""``python -m fusewire.bench``, the same as ``python -m fusewire bench``."""

from . import main

raise SystemExit(main())
